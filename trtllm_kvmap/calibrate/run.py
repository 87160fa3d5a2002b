"""One pass over the text with both models: moments, the token table and the sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.accumulate import PartSums
from trtllm_kvmap.calibrate.capture import (
    captured,
    read,
    sink_entry,
    token_table,
)
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.continuation import Asked, asked_after
from trtllm_kvmap.calibrate.distributed import add_over_ranks, place
from trtllm_kvmap.calibrate.parts import plan_parts
from trtllm_kvmap.calibrate.regard import projections, regard
from trtllm_kvmap.calibrate.text import shared_prefix, text_digest
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.models import LoadedModel, require_same_tokens

# Tokens of the prompt head that are kept exactly; chat templates share about this many.
SINK_TOKENS = 16


def calibrate(
    source: LoadedModel,
    target: LoadedModel,
    documents: Sequence[Sequence[int]],
    config: CalibrationConfig,
    out_path: str | Path,
    *,
    continuations: Sequence[Sequence[Sequence[int]]] | None = None,
    resume: bool = False,
    on_document: Callable[[int, int], None] | None = None,
) -> MomentSet:
    """Read ``documents`` (token ids, see text.read_documents) with both models and write the
    moments to ``out_path``.

    With ``weighting`` sensitivity or attention, ``continuations`` are what the target reads after
    each document (token ids, any number of them: questions, say) and what its keys and values are
    weighed by. None takes the last quarter of every document, whose tokens then add nothing
    themselves.

    Memory stays bounded: a document's activations are dropped before the next one is read. Every
    ``checkpoint_every`` documents the sums so far go to ``<out_path>.partial``, which is removed at
    the end; ``resume`` continues from it (from the start if there is none) and ends with the same
    bytes as a run that was never interrupted. In a torch.distributed group each rank reads
    documents[rank::ranks], all return the sum, and rank 0 writes it. ``on_document(done, total)``
    counts this rank's documents.

    Raises MismatchError for models with different tokenizers or a partial file of another run,
    InputError for unusable documents, NumericsError when a model computes NaN or infinity,
    UnavailableError when rows are to be weighed and the target's output projection is not found.
    """
    require_same_tokens(source, target)
    _require_usable(source, target, documents, config)
    plans = plan_parts(source.spec, target.spec, config)
    rank, ranks = place()
    mine = range(rank, len(documents), ranks)
    partial = partial_path(out_path)
    asked = _asked(target, documents, config, continuations)
    record: dict[str, Any] = {
        "config": {**asdict(config), "layers": list(config.layers)},
        "text": [text_digest(documents)],
    }
    if continuations is not None:
        record["text"].append(text_digest([ids for each in continuations for ids in each]))
    record["config"].pop("checkpoint_every")  # changes no number
    run = {**record, "rank": rank, "ranks": ranks}

    weighted = config.weighting != "uniform"
    projected = projections(target) if weighted else None
    done, sums = 0, [PartSums(plan, weighted=weighted) for plan in plans]
    if resume and partial.exists():
        saved = _load_partial(partial, source, target, run)
        done = saved.record["documents"]
        sums = [PartSums(p, saved=s) for p, s in zip(plans, saved.parts, strict=True)]
    for number in mine[done:]:
        _add_document(sums, source, target, *asked[number], config, projected)
        done += 1
        if done % config.checkpoint_every == 0 and done < len(mine):
            _moment_set(source, target, sums, {**run, "documents": done}).save(partial)
        if on_document is not None:
            on_document(done, len(mine))
    add_over_ranks(sums)
    prefix = shared_prefix(documents, SINK_TOKENS)
    moments = replace(
        _moment_set(source, target, sums, {**record, "documents": len(documents)}),
        token_table=token_table(target),
        sinks=(sink_entry(target, prefix),) if prefix else (),
    )
    if rank == 0:
        moments.save(out_path)
    partial.unlink(missing_ok=True)
    return moments


def partial_path(out_path: str | Path) -> Path:
    """Where this rank's sums are kept until ``out_path`` is written."""
    rank, ranks = place()
    return Path(f"{out_path}.partial" if ranks == 1 else f"{out_path}.partial.{rank}")


def _asked(
    target: LoadedModel,
    documents: Sequence[Sequence[int]],
    config: CalibrationConfig,
    continuations: Sequence[Sequence[Sequence[int]]] | None,
) -> list[Asked]:
    """By a document's number: the tokens that are added, and what is read after them."""
    if config.weighting == "uniform":
        if continuations is not None:
            raise InputError(
                "continuations are not read with weighting uniform; choose sensitivity or "
                "attention, or leave them out."
            )
        return [(ids, ()) for ids in documents]
    asked = asked_after(documents, continuations, config.skip_first + 1)
    longest = max(len(ids) + max(map(len, after)) for ids, after in asked)
    limit = target.spec.max_positions
    if longest > limit:
        raise InputError(
            f"A document and its continuation have {longest} tokens together, but {target.name} "
            f"reads at most {limit}; cut the document."
        )
    return asked


def _add_document(
    sums: list[PartSums],
    source: LoadedModel,
    target: LoadedModel,
    token_ids: Sequence[int],
    continuations: Sequence[Sequence[int]],
    config: CalibrationConfig,
    projected: torch.Tensor | None,
) -> None:
    """A function of its own, so that nothing holds the activations when the next one is read."""
    ids = torch.tensor(token_ids)
    cache = read(target, ids)
    kv = captured(source, read(source, ids)), captured(target, cache)
    skip, weights = config.skip_first, None
    noted = None
    if projected is not None:
        noted = regard(target, cache, continuations, config.weighting, projected)
    del cache  # one copy of the document is enough while it is added up
    for part in sums:
        if noted is not None:
            weights = part.add_regard(noted, skip, config.ess_floor)
        part.add(*kv, skip, weights)


def _moment_set(
    source: LoadedModel, target: LoadedModel, sums: list[PartSums], record: dict[str, Any]
) -> MomentSet:
    return MomentSet(
        source=source.spec,
        target=target.spec,
        source_fingerprint=source.fingerprint,
        target_fingerprint=target.fingerprint,
        parts=tuple(part.part() for part in sums),
        record={**record, "tokens": sums[0].count},
    )


def _load_partial(
    path: Path, source: LoadedModel, target: LoadedModel, run: dict[str, Any]
) -> MomentSet:
    saved = MomentSet.load(path)
    differing = [
        "the source model" if saved.source_fingerprint != source.fingerprint else "",
        "the target model" if saved.target_fingerprint != target.fingerprint else "",
        *(name for name in run if saved.record.get(name) != run[name]),
    ]
    if any(differing):
        raise MismatchError(
            f"{path} belongs to another calibration ({', '.join(filter(None, differing))} differ). "
            f"Resume with what it was started with, or run without resume to begin again."
        )
    return saved


def _require_usable(
    source: LoadedModel,
    target: LoadedModel,
    documents: Sequence[Sequence[int]],
    config: CalibrationConfig,
) -> None:
    if not documents:
        raise InputError("There is no document to calibrate on; give at least one.")
    longest = config.window(source.spec, target.spec)
    known = min(source.spec.vocab_size, target.spec.vocab_size)
    for number, ids in enumerate(documents):
        if not config.min_tokens <= len(ids) <= longest:
            raise InputError(
                f"Document {number} has {len(ids)} tokens; {config.min_tokens} to {longest} are "
                f"needed. Cut long documents into windows, and leave out short ones."
            )
        if not 0 <= min(ids) <= max(ids) < known:
            raise InputError(
                f"Document {number} has token ids from {min(ids)} to {max(ids)}; both models know "
                f"0 to {known - 1}."
            )
