"""`pooled`: all heads of a target layer read all heads of the same k best source layers."""

from __future__ import annotations

from collections.abc import Iterator

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.fit.blocks import FittedGroup, fit_blocks, readable_slices, targets_by_layer
from trtllm_kvmap.fit.centred import CentredPart, describe
from trtllm_kvmap.fit.config import FitConfig


def fit_pooled(part: CentredPart, config: FitConfig) -> Iterator[FittedGroup]:
    """One wide group per target layer and field. Raises MismatchError for moments that were sharded
    by head.
    """
    for field in part.target_fields():
        readable = readable_slices(part, field, config)
        groups = targets_by_layer(part, field)
        heads = {s.head for s in readable}, {t.head for t in part.targets}
        if [len(x) for x in heads] != [part.source.num_kv_heads, part.target.num_kv_heads]:
            raise MismatchError(
                f"pooled reads all heads of a layer together, but the moments of "
                f"{describe(part.targets)} were sharded by head; calibrate with scope all."
            )
        layers = sorted({s.layer for s in readable})
        blocks = [tuple(s for s in readable if s.layer == layer) for layer in layers]
        yield from fit_blocks(part, blocks, groups, config.k, config)
