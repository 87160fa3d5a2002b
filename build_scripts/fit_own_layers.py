"""Quality against how many of the target's own shallow layers a map may read (run it through
bench.py fits).

With m layers computed natively, at m / L of the prefill, those are exact and tell the deeper ones
what the source cannot. No host computes them yet beyond layer 0; here they are taken from the
target's own cache and stood behind the source's layers, which is what a host would do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.accumulate import PartSums
from trtllm_kvmap.calibrate.capture import CapturedKv, capture_kv, token_table
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.parts import plan_parts
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.probe import Ready
from trtllm_kvmap.evaluate.reading import Reading
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import fork, make_cache, view_pool
from trtllm_kvmap.mapper.backends import make_mapper
from trtllm_kvmap.mapper.contract import Span
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

SKIP_FIRST = 4
CONFIG = FitConfig(scope="slice", n=6, ridge=1e-6, own_slices=False)


def own_layers_curve(
    source: LoadedModel,
    target: LoadedModel,
    texts: Sequence[Item],
    readings: Sequence[Reading],
    figures: Callable[[Sequence[Ready]], dict[str, Any]],
    plan: dict[str, int],
) -> list[dict[str, Any]]:
    """One row for each m from 0 to the target's layers less one. The two models need equal KV heads
    and head_dim, because the target's layers stand in as layers of the source.
    """
    rows = []
    for own in range(target.spec.num_layers):
        wide = replace(source.spec, num_layers=source.spec.num_layers + own)
        kvmap = fit(_moments(source, target, wide, texts, own), CONFIG)
        mapper = make_mapper(kvmap, "cpu")
        ready = [_hand_over(mapper, reading, own, plan) for reading in readings]
        share = own / target.spec.num_layers
        rows.append({"own_layers": own, "prefill_share": share, **figures(ready)})
    return rows


def _moments(
    source: LoadedModel, target: LoadedModel, wide: Any, texts: Sequence[Item], own: int
) -> MomentSet:
    config = CalibrationConfig(skip_first=SKIP_FIRST)
    sums = [PartSums(plan) for plan in plan_parts(wide, target.spec, config)]
    for item in texts:
        ids = torch.tensor(item.context)
        read, native = capture_kv(source, ids), capture_kv(target, ids)
        both = CapturedKv(
            torch.cat([read.keys, native.keys[:own]]), torch.cat([read.values, native.values[:own]])
        )
        for part in sums:
            part.add(both, native, SKIP_FIRST)
    return MomentSet(
        source=wide,
        target=target.spec,
        source_fingerprint=source.fingerprint,
        target_fingerprint=target.fingerprint,
        parts=tuple(part.part() for part in sums),
        record={"documents": len(texts), "tokens": sums[0].count},
        token_table=token_table(target),
    )


def _hand_over(mapper: Any, reading: Reading, own: int, plan: dict[str, int]) -> Ready:
    token_ids, target = reading.item.context, reading.target.model
    planned = plan_handoff(len(token_ids), **plan)
    native, read = view_pool(reading.target.cache), view_pool(reading.source.cache)
    wide = KvPool(read.keys + native.keys[:own], read.values + native.values[:own])
    cache = make_cache(target.spec, planned.mapped.stop)
    pool = view_pool(cache)
    slots = torch.arange(planned.mapped.start, planned.mapped.stop)
    span = Span(slots, slots, slots, torch.tensor(token_ids)[slots], len(token_ids), len(token_ids))
    mapper.map_kv(wide, pool, span)
    for field in ("keys", "values"):
        for layer, (mine, exact) in enumerate(
            zip(getattr(pool, field), getattr(native, field), strict=True)
        ):
            stop = planned.mapped.stop if layer < own else planned.first.stop
            mine[:, :, :stop] = exact[:, :, :stop]
    tail = prefill(target, token_ids[planned.repaired.start :], fork(cache), logits_to_keep=1)
    return Ready(target, tail.cache, tail.logits[-1], len(token_ids), planned.mapped)
