"""Two models as a pipeline sees them, and everything that forbids to build one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.parameters import count_parameters
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.models import load_tokenizer, read_spec, tokenizer_digest
from trtllm_kvmap.spec.model import ModelSpec

CONFIG = "config.json"
# Newer transformers make an empty tokenizer of a configuration alone, so one must be seen to exist.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class Side:
    """One model, read off its configuration. ``tokenizer`` is its digest, None where the folder
    has no tokenizer.
    """

    folder: Path
    spec: ModelSpec
    num_parameters: int
    tokenizer: str | None


def read_side(path: str | Path) -> Side:
    """The model of a folder, or of a config.json alone. Weights are not read.

    Raises InputError when there is no configuration to read and MismatchError for an architecture
    this package does not map.
    """
    path = Path(path)
    folder = path.parent if path.name == CONFIG else path
    file = folder / CONFIG
    if not file.is_file():
        raise InputError(
            f"There is no {file}; give the folder of a model, or its config.json. A hub id must be "
            f"downloaded first."
        )
    spec = read_spec(folder)
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    try:
        parameters = count_parameters(config, spec)
    except KeyError as error:
        raise InputError(
            f"{file} has no {error}, without which its weights cannot be counted; complete it."
        ) from error
    there = any((folder / name).is_file() for name in TOKENIZERS)
    tokenizer = load_tokenizer(folder) if there else None
    digest = tokenizer_digest(tokenizer, spec.vocab_size) if tokenizer is not None else None
    return Side(folder, spec, parameters, digest)


def refusals(
    source: Side, target: Side, config: PipelineConfig, kvmap: KvMap | None
) -> Iterator[str]:
    """One sentence for everything that forbids a pipeline of these two models."""
    for what, side in (("source", source), ("target", target)):
        spec = side.spec
        if spec.max_positions < config.max_tokens:
            yield (
                f"the {what} allows {spec.max_positions} tokens, fewer than max_tokens "
                f"{config.max_tokens}: lower max_tokens"
            )
        if spec.rope.length_dependent:
            yield (
                f"the {what} uses {spec.rope.kind} RoPE, whose frequencies follow the sequence's "
                f"length, and an engine keeps one table: use the hf lane"
            )
    if None not in (source.tokenizer, target.tokenizer) and source.tokenizer != target.tokenizer:
        yield "the two models have different tokenizers: choose a pair of one family"
    if source.spec.vocab_size < target.spec.vocab_size and None in (
        source.tokenizer,
        target.tokenizer,
    ):
        yield (
            f"the source knows {source.spec.vocab_size} token ids and the target "
            f"{target.spec.vocab_size}, and there are no two tokenizers to compare: give folders "
            f"with tokenizers"
        )
    if kvmap is not None:
        yield from _map_refusals(source, target, kvmap)


def _map_refusals(source: Side, target: Side, kvmap: KvMap) -> Iterator[str]:
    for what, side, fitted in (
        ("source", source, kvmap.source),
        ("target", target, kvmap.target),
    ):
        if side.spec.kv_shape != fitted.kv_shape or side.spec.rope != fitted.rope:
            yield (
                f"the map was fitted for a {what} of (layers, KV heads, head_dim) = "
                f"{fitted.kv_shape} with {fitted.rope.kind} RoPE, and {side.spec.name} has "
                f"{side.spec.kv_shape} with {side.spec.rope.kind}: give the map of this pair"
            )
    for group in kvmap.groups:
        if group.second is not None and group.second.activation != "identity":
            yield (
                f"the map's {group.field} of layer {group.layer} has a second term with the "
                f"activation {group.second.activation}, which the kernels do not compute: give a "
                f"map without it"
            )
            return


def require_pair(source: Side, target: Side, config: PipelineConfig, kvmap: KvMap | None) -> None:
    """Raise MismatchError with every refusal in one message, or return."""
    found = list(refusals(source, target, config, kvmap))
    if found:
        raise MismatchError(f"No pipeline can be built: {'; '.join(found)}.")
