"""The one door through which models and tokenizers are loaded, and what is read off their
configuration.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.stored_weights import stored_digest
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import KINDS, RopeParams

log = logging.getLogger(__name__)

# Architectures whose cache is known to hold k-normed, rotated keys; the value says whether RoPE
# pairs are interleaved.
ARCHITECTURES = {
    "qwen2": False,
    "qwen3": False,
    "llama": False,
    "mistral": False,
    "ministral": False,
    "ministral3": False,
    "phi3": False,
    "glm": True,
    "glm4": True,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer (None for a folder without one) and its spec. ``fingerprint`` is
    computed on first use.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    spec: ModelSpec

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self.model, self.tokenizer, self.spec)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises InputError when there is no tokenizer or it cannot write ``text``."""
        return tokenise(self.tokenizer, self.name, text, add_special_tokens=add_special_tokens)

    def rope_length(self, sequence_length: int) -> int:
        """The length whose frequencies the keys of a pass ending at ``sequence_length`` tokens were
        written with.

        transformers' dynamic RoPE remembers the longest sequence it has seen; every other kind
        depends on this sequence alone.
        """
        if self.spec.rope.kind != "dynamic" or sequence_length < self.spec.rope.original_length:
            return sequence_length  # a sequence shorter than the original length resets the memory
        rotary: Any = self.model.base_model.rotary_emb
        return max(sequence_length, int(rotary.max_seq_len_cached))

    @cached_property
    def cache_argument(self) -> str:
        """What the model's forward calls its cache: past_key_values, or cache in newer
        transformers.
        """
        accepted = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in accepted else "past_key_values"


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that another process holds: enough to check a cache it sent, not to run it."""

    name: str
    spec: ModelSpec
    fingerprint: Fingerprint


KnownModel = LoadedModel | RemoteModel


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What can be said of a model without loading its weights."""

    spec: ModelSpec
    tokenizer_digest: str


def describe_model(path_or_id: str | Path) -> ModelDescription:
    """Read the configuration and tokenizer of a folder or hub id. Raises as load_model does."""
    spec = read_spec(path_or_id)
    return ModelDescription(spec, tokenizer_digest(load_tokenizer(path_or_id), spec.vocab_size))


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
    except (OSError, ValueError) as error:
        raise _not_loadable(path_or_id, error) from error
    return LoadedModel(spec.name, model.to(device).eval(), load_tokenizer(path_or_id), spec)


def read_spec(path_or_id: str | Path) -> ModelSpec:
    """The KV geometry of a folder or hub id, from its configuration. Raises as load_model does."""
    name = Path(path_or_id).name if Path(path_or_id).is_dir() else str(path_or_id)
    try:
        config = AutoConfig.from_pretrained(path_or_id)
    except (OSError, ValueError) as error:
        raise _not_loadable(path_or_id, error) from error
    return spec_from_config(config, name)


def _not_loadable(path_or_id: str | Path, error: Exception) -> InputError:
    reason = str(error).strip().splitlines()[0]
    if str(path_or_id).startswith(("/", ".", "~")) and not Path(path_or_id).exists():
        reason = "There is no such folder."
    return InputError(
        f"No model could be loaded from {str(path_or_id)!r}: {reason} Give a folder with "
        f"config.json and safetensors weights, or a hub id where there is a network."
    )


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub id, or None when it has none (pre-tokenised text still
    works).
    """
    try:
        return AutoTokenizer.from_pretrained(path_or_id)
    except (OSError, ValueError):
        return None


def tokenise(
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    text: str,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Token ids of ``text`` for the model called ``name``. Raises InputError when there is no
    tokenizer or it cannot write ``text``.
    """
    called: Any = tokenizer
    if called is None:
        raise InputError(f"{name} has no tokenizer, so it cannot read text; give token ids.")
    try:
        ids = called(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except Exception as error:  # fast tokenizers raise nothing narrower for a word they lack
        raise InputError(
            f"The tokenizer of {name} cannot write {text[:60]!r}: {error}. Give text in its "
            f"vocabulary."
        ) from error
    return list(ids)


def tokenise_chat(
    tokenizer: PreTrainedTokenizerBase | None, name: str, messages: list[dict[str, str]]
) -> list[int]:
    """Token ids of ``messages`` ({"role", "content"} each) in the tokenizer's own chat template.
    Raises InputError when there is no template, or it does not take these messages.
    """
    called: Any = tokenizer
    if not getattr(called, "chat_template", None):
        raise InputError(f"{name} has no chat template; give text or token ids.")
    try:
        ids = called.apply_chat_template(messages, tokenize=True, return_dict=False)
    except Exception as error:  # templates raise whatever their author chose
        raise InputError(
            f"The chat template of {name} does not take these messages: {error}"
        ) from error
    return list(ids)


def quiet_loading() -> None:
    """Turn off transformers' own progress bars: a command line shows its own."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def require_same_tokens(source: KnownModel, target: KnownModel) -> None:
    """Raise MismatchError unless both models read the same token ids."""
    if source.fingerprint.tokenizer != target.fingerprint.tokenizer:
        raise MismatchError(
            f"{source.name} and {target.name} have different tokenizers, so their caches do not "
            f"stand for the same "
            f"tokens. A map needs one tokenizer for both; choose a pair of one family."
        )


def spec_from_config(config: Any, name: str) -> ModelSpec:
    """The KV geometry that ``config`` (a transformers configuration) describes. Raises
    MismatchError, see load_model.
    """
    config = getattr(config, "text_config", None) or config
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise MismatchError(
            f"The architecture {kind!r} of {name} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    _refuse_windows(config, name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = rope_from_config(config, head_dim)
    # dynamic RoPE stretches the declared length; every other kind declares the stretched one.
    stretch = rope.factor if rope.kind == "dynamic" else 1.0
    return ModelSpec(
        name=name,
        architecture=kind,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_positions=int(config.max_position_embeddings * stretch),
        rope=rope,
        dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
    )


def _refuse_windows(config: Any, name: str) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    if kinds != {"full_attention"} or (windowed and not getattr(config, "layer_types", None)):
        raise MismatchError(
            f"{name} uses sliding-window attention in some layers; a map needs full attention in "
            f"every layer, because "
            f"a window has dropped the keys it would write."
        )


def rope_from_config(config: Any, head_dim: int) -> RopeParams:
    """RoPE as ``config`` declares it, in both the 4.x (rope_theta, rope_scaling) and 5.x
    (rope_parameters) form.
    """
    declared = {
        **(getattr(config, "rope_scaling", None) or {}),
        **(getattr(config, "rope_parameters", None) or {}),
    }
    kind = declared.get("rope_type", declared.get("type", "default")) or "default"
    if kind not in KINDS:
        raise MismatchError(
            f"RoPE kind {kind!r} is not supported; supported are {', '.join(KINDS)}."
        )
    partial = (
        declared.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
    )
    length = config.max_position_embeddings
    trained = declared.get(
        "original_max_position_embeddings",
        getattr(config, "original_max_position_embeddings", None),
    )
    original = length if kind == "dynamic" else (trained or length)
    factor = float(declared.get("factor") or length / original)
    return RopeParams(
        kind=kind,
        theta=float(declared.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        rotary_dim=int(head_dim * partial),
        interleaved=ARCHITECTURES[config.model_type],
        factor=factor,
        original_length=int(original),
        attention_factor=_attention_factor(kind, declared, factor, int(original)),
        beta_fast=float(declared.get("beta_fast") or 32.0),
        beta_slow=float(declared.get("beta_slow") or 1.0),
        truncate=bool(declared.get("truncate", True)),
        low_freq_factor=float(declared.get("low_freq_factor") or 1.0),
        high_freq_factor=float(declared.get("high_freq_factor") or 4.0),
        short_factor=tuple(declared.get("short_factor") or ()) if kind == "longrope" else (),
        long_factor=tuple(declared.get("long_factor") or ()) if kind == "longrope" else (),
    )


def _attention_factor(kind: str, declared: dict[str, Any], factor: float, original: int) -> float:
    given = declared.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return float(given)
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, mscale_all = declared.get("mscale"), declared.get("mscale_all_dim")
    if mscale and mscale_all:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def fingerprint_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec
) -> Fingerprint:
    """Digests of a loaded model: one changed weight, token or RoPE parameter changes one."""
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return Fingerprint(
        config=_config_digest(spec),
        weights=weights.hexdigest(),
        tokenizer=tokenizer_digest(tokenizer, spec.vocab_size),
    )


def read_fingerprint(path_or_id: str | Path) -> Fingerprint:
    """The fingerprint of a folder or hub id, equal to ``load_model(path_or_id).fingerprint``.

    The weights are read from their files piece by piece, in little memory. Where the files do not
    hold the model's own tensors one by one (quantised, fused or renamed weights, an adapter, no
    safetensors) the model is loaded in float32 after all, and a warning says why. Raises as
    load_model does.
    """
    spec = read_spec(path_or_id)
    try:
        weights = _stored_weights(path_or_id)
    except MismatchError as reason:
        log.warning(
            "The weights of %s cannot be checked from their files (%s), so the model is loaded in "
            "float32 for it.",
            path_or_id,
            reason,
        )
        return load_model(path_or_id).fingerprint
    tokenizer = tokenizer_digest(load_tokenizer(path_or_id), spec.vocab_size)
    return Fingerprint(_config_digest(spec), weights, tokenizer)


def _stored_weights(path_or_id: str | Path) -> str:
    """The digest of the weights, from their files. Raises MismatchError when these do not say what
    loading them would give.
    """
    config = AutoConfig.from_pretrained(path_or_id)
    for entry in ("quantization_config", "transformers_weights"):
        if getattr(config, entry, None):
            raise MismatchError(f"The configuration has a {entry}.")
    if _file_of(path_or_id, "adapter_config.json"):
        raise MismatchError("There is an adapter beside them.")
    with torch.device("meta"):  # names and shapes, without memory
        called: Any = AutoModelForCausalLM
        model = called.from_config(config, dtype=torch.float32)
    state = model.state_dict()
    if other := sorted(name for name, tensor in state.items() if tensor.dtype != torch.float32):
        raise MismatchError(f"The model has tensors that are no floats, such as {other[0]}.")
    first: dict[int, str] = {}  # of the parameters that are one tensor under several names
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (stored := first.setdefault(id(parameter), name)) != name:
            ties[name] = stored
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return stored_digest(_weight_files(path_or_id), shapes, ties)


def _weight_files(path_or_id: str | Path) -> list[Path]:
    """The safetensors files that loading would read. Raises MismatchError when there are none."""
    if whole := _file_of(path_or_id, SAFE_WEIGHTS_NAME):
        return [Path(whole)]
    if index := _file_of(path_or_id, SAFE_WEIGHTS_INDEX_NAME):
        try:
            shards, _ = get_checkpoint_shard_files(path_or_id, index)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, LookupError) as error:
            raise MismatchError(f"Their index cannot be followed: {error}.") from error
        return [Path(shard) for shard in shards]
    raise MismatchError("They are not stored as safetensors.")


def _file_of(path_or_id: str | Path, name: str) -> str | None:
    try:
        found: str | None = cached_file(
            path_or_id,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError as error:
        raise MismatchError(f"{name} cannot be had: {error}.") from error
    return found


def _config_digest(spec: ModelSpec) -> str:
    config = json.dumps(asdict(replace(spec, name="")), sort_keys=True)
    return hashlib.sha256(config.encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> str:
    """A digest of what turns text into ids; padding, truncation and chat template do not count."""
    if tokenizer is None:
        return hashlib.sha256(f"no tokenizer, {vocab_size} ids".encode()).hexdigest()
    if tokenizer.is_fast:
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        described.pop("padding", None)
        described.pop("truncation", None)
    else:
        described = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
