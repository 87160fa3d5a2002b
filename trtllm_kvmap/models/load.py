"""Models and their descriptions, from a folder or a hub id."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.pair import HasPair, require_pair
from trtllm_kvmap.errors import InputError, KvMapError
from trtllm_kvmap.models.config import spec_from_config
from trtllm_kvmap.models.digest import config_digest
from trtllm_kvmap.models.loaded import LoadedModel, different_tokenizers
from trtllm_kvmap.models.tokenizer import load_tokenizer, tokenizer_digest
from trtllm_kvmap.spec.model import ModelSpec

WEIGHTS = (".safetensors", ".bin")  # how the names of files end that transformers loads


@dataclass(frozen=True)
class ModelDescription:
    """What can be said of a model without loading its weights."""

    spec: ModelSpec
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property  # a whole vocabulary is hashed, and it is asked for more than once
    def tokenizer_digest(self) -> str:
        return tokenizer_digest(self.tokenizer, self.spec.vocab_size)


def describe_model(path_or_id: str | Path) -> ModelDescription:
    """Read the configuration and tokenizer of a folder or hub id. Raises as load_model does."""
    return ModelDescription(read_spec(path_or_id), load_tokenizer(path_or_id))


def describe_pair(
    source: str | Path, target: str | Path
) -> tuple[ModelDescription, ModelDescription]:
    """describe_model of both, which tells before any weights are loaded what can never be mapped.
    Raises InputError for a folder without weights, MismatchError unless both read the same token
    ids.
    """
    pair = describe_model(source), describe_model(target)
    for given in (source, target):
        folder = Path(given)
        if folder.is_dir() and not any(f.suffix in WEIGHTS for f in folder.iterdir()):
            raise _not_loadable(given, "There are no weights in this folder.")
    if pair[0].tokenizer_digest != pair[1].tokenizer_digest:
        raise different_tokenizers(pair[0].name, pair[1].name)
    return pair


def require_described(
    holder: HasPair,
    source: ModelDescription,
    target: ModelDescription,
    what: str = "The map was fitted",
) -> None:
    """require_pair, as far as configurations and tokenizers tell, which no weights are read for."""
    theirs = holder.source_fingerprint, holder.target_fingerprint
    told = [(config_digest(m.spec), m.tokenizer_digest) for m in (source, target)]

    def given(weights: tuple[Fingerprint, Fingerprint]) -> tuple[Fingerprint, Fingerprint]:
        first, second = (
            Fingerprint(config, like.weights, tokenizer)
            for (config, tokenizer), like in zip(told, weights, strict=True)
        )
        return first, second

    straight, swapped = given(theirs), given(theirs[::-1])
    if straight != theirs:
        require_pair(holder, *(swapped if swapped == theirs[::-1] else straight), what)


def load_model(
    path_or_id: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """Load a local Hugging Face folder, or a hub id where there is a network.

    Raises InputError when nothing can be loaded from there and MismatchError when the architecture
    keeps another kind of cache than this package maps (sliding windows, latent attention, an
    unknown key layout).
    """
    spec = read_spec(path_or_id)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype)
    except Exception as error:  # transformers raises whatever a folder's files make it meet
        raise _not_loadable(path_or_id, _reason(error)) from error
    model = model.to(device).eval().requires_grad_(False)  # a gradient is never of its weights
    return LoadedModel(spec.name, model, load_tokenizer(path_or_id), spec)


def read_spec(path_or_id: str | Path) -> ModelSpec:
    """The KV geometry of a folder or hub id, from its configuration. Raises as load_model does."""
    try:
        if missing := _missing(str(path_or_id)):
            raise _not_loadable(path_or_id, missing)
        name = Path(path_or_id).name if Path(path_or_id).is_dir() else str(path_or_id)
        return spec_from_config(AutoConfig.from_pretrained(path_or_id), name)
    except KvMapError:
        raise
    except Exception as error:  # a configuration may hold anything
        raise _not_loadable(path_or_id, _reason(error)) from error


def _missing(given: str) -> str:
    """What a path lacks to be a model's folder, so that no hub is asked for it; "" for such a
    folder, and for what may be a hub id: `name`, or `org/name` where there is no folder `org`.
    """
    path, parts = Path(given), given.split("/")
    if path.is_dir():
        return "" if (path / "config.json").is_file() else "There is no config.json in this folder."
    if path.exists():
        return "This is a file."
    if given.startswith((".", "/", "~")) or len(parts) > 2:
        return "There is no such folder."
    if len(parts) == 2 and path.parent.is_dir():
        return f"There is no {parts[1]!r} in the folder {parts[0]!r}."
    return ""


def _reason(error: Exception) -> str:
    """The first line of what ``error`` says, and the next where that one ends in a colon; after its
    name where that is not a sentence.
    """
    first, *rest = str(error).strip().splitlines() or [""]
    if rest and first.endswith(":"):
        first = f"{first} {rest[0].strip()}"
    if isinstance(error, (OSError, ValueError, SafetensorError)) and first:
        return first
    return f"{type(error).__name__}: {first}"


def _not_loadable(path_or_id: str | Path, reason: str) -> InputError:
    return InputError(
        f"No model could be loaded from {str(path_or_id)!r}: {reason.rstrip('.')}. Give a folder "
        f"with config.json and safetensors weights, or a hub id (org/name) where there is a "
        f"network."
    )


def quiet_loading() -> None:
    """Turn off transformers' own progress bars, and the hub's word on every attempt to reach it: a
    command line shows its own bars, and says how it ended.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
