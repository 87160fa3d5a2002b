"""Head-local matrices with a small correction that the heads of a layer share (run it through
bench.py fits), against maps of the same size that need none.

Each target head reads its own head's slices; a matrix of low rank over all heads' slices adds what
these leave. No file holds such a pair, because a second term reads the slices of its group; here it
is multiplied out, and its parameters are counted as if it were not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.fit.centred import CentredPart
from trtllm_kvmap.spec.slices import Slice

LOCAL = FitConfig(scope="head", k=3, ridge=1e-6, fields="both")
RANKS, SLICES, LOW_RANKS = (0, 4, 8, 16), (5, 6, 7, 8), (24, 28, 32)


def shared_correction_curve(
    moments: MomentSet, figures: Callable[[KvMap], dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row for each rank of the correction, and for maps of scope slice and of low rank about as
    large. The two models need equally many KV heads, as head-local matrices do.
    """
    pooled = replace(LOCAL, scope="pooled")
    local, full = fit(moments, LOCAL), fit(moments, pooled)
    rows = []
    for rank in RANKS:
        kvmap = _corrected(moments, local, full, rank)
        correction = sum(rank * sum(g.weight.shape) for g in full.groups if g.weight is not None)
        size = local.num_parameters + correction
        rows.append({"map": f"head, correction {rank}", "parameters": size, **figures(kvmap)})
    others = {
        f"slice, {n}": replace(LOCAL, scope="slice", n=n, own_slices=False) for n in SLICES
    } | {f"pooled, rank {r}": replace(pooled, rank=r, cut="output") for r in LOW_RANKS}
    for name, config in others.items():
        kvmap = fit(moments, config)
        rows.append({"map": name, "parameters": kvmap.num_parameters, **figures(kvmap)})
    return rows


def _corrected(moments: MomentSet, local: KvMap, full: KvMap, rank: int) -> KvMap:
    """The pooled solution less the head-local one is what ridge makes of what these leave; the
    least error of a given rank is then the truncated SVD over the text.
    """
    parts = {
        (t.field, t.layer): CentredPart(part, moments.source, moments.target)
        for part in moments.parts
        for t in part.targets
    }
    groups = []
    for group in full.groups:
        part = parts[group.field, group.layer]
        kept = _spread(local, group)
        assert group.weight is not None  # fitted, and no copy
        rest = group.weight.double() - kept
        seen = rest.T @ part.gram(group.slices) @ rest
        directions = torch.linalg.eigh(seen)[1][:, len(seen) - rank :]
        weight = kept + rest @ directions @ directions.T
        targets = [Slice("target", group.field, group.layer, head) for head in group.heads]
        mean = part.source_mean[part.columns(group.slices)]
        bias = part.target_mean[part.target_columns(targets)] - weight.T @ mean
        groups.append(replace(group, weight=weight.float(), bias=bias.float()))
    return replace(full, groups=tuple(groups))


def _spread(local: KvMap, pooled: HeadGroup) -> torch.Tensor:
    """The head-local matrices of one layer and field in the rows of ``pooled``, zero elsewhere."""
    assert pooled.weight is not None
    spread = torch.zeros_like(pooled.weight, dtype=torch.float64)
    blocks = spread.view(len(pooled.slices), -1, len(pooled.heads), local.target.head_dim)
    for group in local.groups:
        if (group.field, group.layer) == (pooled.field, pooled.layer):
            assert group.weight is not None
            rows = group.weight.double().view(len(group.slices), -1, local.target.head_dim)
            for s, block in zip(group.slices, rows, strict=True):
                blocks[pooled.slices.index(s), :, pooled.heads.index(group.heads[0])] = block
    return spread
