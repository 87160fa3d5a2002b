"""The fingerprint of a model that is not loaded: its weights are read from their files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.stored_weights import stored_digest
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.models.digest import config_digest
from trtllm_kvmap.models.load import load_model, read_spec
from trtllm_kvmap.models.tokenizer import load_tokenizer, tokenizer_digest

log = logging.getLogger(__name__)


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
    return Fingerprint(config_digest(spec), weights, tokenizer)


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
        try:
            model = called.from_config(config, dtype=torch.float32)
        except ValueError as error:
            raise MismatchError("Their configuration is of no language model.") from error
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
