"""`head`: a target head reads the same head of the k best source layers."""

from __future__ import annotations

from collections.abc import Iterator

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.fit.blocks import FittedGroup, fit_blocks, readable_slices
from trtllm_kvmap.fit.centred import CentredPart
from trtllm_kvmap.fit.config import FitConfig


def fit_head(part: CentredPart, config: FitConfig) -> Iterator[FittedGroup]:
    """Raises MismatchError unless both models have equally many KV heads; head_dim may differ."""
    source, target = part.source, part.target
    if source.num_kv_heads != target.num_kv_heads:
        raise MismatchError(
            f"head needs equally many KV heads; {source.name} has {source.num_kv_heads} and "
            f"{target.name} {target.num_kv_heads}. Use the scope slice, which reads any head."
        )
    for field in part.target_fields():
        readable = readable_slices(part, field, config)
        for head in sorted({t.head for t in part.targets}):
            layers = sorted({s.layer for s in readable})
            blocks = [
                tuple(s for s in readable if (s.layer, s.head) == (layer, head)) for layer in layers
            ]
            groups = [(t,) for t in part.targets if (t.field, t.head) == (field, head)]
            yield from fit_blocks(part, blocks, groups, config.k, config)
