"""`slice`: a target head reads the n best slices of any source layer and head."""

from __future__ import annotations

from collections.abc import Iterator

from trtllm_kvmap.fit.blocks import FittedGroup, fit_blocks, readable_slices, targets_by_layer
from trtllm_kvmap.fit.centred import CentredPart
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.fit.copy import copied
from trtllm_kvmap.spec.slices import Slice


def fit_slice(part: CentredPart, config: FitConfig) -> Iterator[FittedGroup]:
    """Works for any pair of shapes. With ``own_slices`` the target's own layer 0 stands among the
    candidates, and the heads of layer 0 itself are their own slices unchanged: exact at no cost.
    """
    for field in part.target_fields():
        readable = readable_slices(part, field, config)
        fields = {s.field for s in readable}
        own = [s for s in part.slices if s.origin == "target" and s.field in fields]
        if config.own_slices:
            readable += own
        groups = []
        for targets in targets_by_layer(part, field):
            native = tuple(Slice("target", field, 0, t.head) for t in targets)
            if config.own_slices and targets[0].layer == 0 and set(native) <= set(own):
                yield copied(part, native, targets)
            else:
                groups += [(t,) for t in targets]
        if groups:
            yield from fit_blocks(part, [(s,) for s in readable], groups, config.n, config)
