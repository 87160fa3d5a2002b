"""Refine: a fitted map and more text become a map with second terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.continuation import asked_after
from trtllm_kvmap.calibrate.text import text_digest
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import LoadedModel, require_same_tokens
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.mlp import train_mlp
from trtllm_kvmap.refine.residual import train_residual


def refine(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    documents: Sequence[Sequence[int]],
    config: RefineConfig,
    *,
    continuations: Sequence[Sequence[Sequence[int]]] | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> KvMap:
    """``kvmap`` with a second term for every group that has a matrix, trained on ``documents``
    (token ids). It carries no evidence; ``fitted["refined"]`` says what was done, the held-out
    loss of each scale, and which was chosen (0: the terms did not help and were left out).

    A residual reads ``continuations`` after each document (None: the document's last quarter); an
    MLP needs none. The last ``held_out`` share of the documents chooses the scale.

    Raises MismatchError for models that are not the map's, or a map that cannot have the terms;
    InputError for too little text; NumericsError when training diverges.
    """
    require_same_tokens(source, target)
    kvmap.require_models(source.fingerprint, target.fingerprint)
    kept = _kept(documents, config)
    record = {"config": asdict(config), "text": text_digest(documents), "documents": len(documents)}
    if config.term == "mlp":
        if continuations is not None:
            raise InputError("An mlp is trained without continuations; leave them out.")
        made = train_mlp(kvmap, source, target, documents[:kept], documents[kept:], config, on_step)
    else:
        asked = asked_after(documents, continuations)
        made = train_residual(kvmap, source, target, asked[:kept], asked[kept:], config, on_step)
    return replace(made, fitted={**made.fitted, "refined": {**record, **made.fitted["refined"]}})


def _kept(documents: Sequence[Sequence[int]], config: RefineConfig) -> int:
    """How many documents train; the rest choose."""
    least = config.skip_first + 2
    short = [n for n, ids in enumerate(documents) if len(ids) < least]
    if len(documents) < 2 or short:
        raise InputError(
            f"At least two documents of at least {least} tokens each are needed, one of them to "
            f"choose the scale; got {len(documents)}, too short: {short[:5] or 'none'}."
        )
    return min(max(1, round(len(documents) * (1 - config.held_out))), len(documents) - 1)
