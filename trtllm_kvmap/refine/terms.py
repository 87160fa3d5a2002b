"""The second terms while they are trained: their first values, and the map they end up in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.calibrate.capture import CapturedKv
from trtllm_kvmap.errors import MismatchError


def trainable(kvmap: KvMap) -> list[int]:
    """The numbers of the groups that can have a second term: those with a matrix.

    Raises MismatchError when there is none, or one of them has a term already.
    """
    numbers = [i for i, group in enumerate(kvmap.groups) if not group.copies]
    if not numbers:
        raise MismatchError(
            f"Every head of this map of scope {kvmap.scope} is a copy, and a copy has no second "
            f"term; fit the map with scope head, pooled or slice."
        )
    if any(kvmap.groups[i].second is not None for i in numbers):
        raise MismatchError(
            "This map has second terms already (a low rank, or an earlier refinement); give one "
            "without."
        )
    return numbers


def columns(kvmap: KvMap, group: HeadGroup, source: CapturedKv, ids: torch.Tensor) -> torch.Tensor:
    """What ``group`` reads, float32 [num_tokens, sum of slice widths], keys pre-RoPE."""
    read = []
    for s in group.slices:
        if s.origin == "source":
            read.append((source.keys if s.field == "key" else source.values)[s.layer, s.head])
        else:
            table = kvmap.token_table
            assert table is not None  # KvMap: it reads token ids, so it has a table
            read.append((table.keys if s.field == "key" else table.values)[ids.cpu(), s.head])
    return torch.cat([x.cpu().float() for x in read], dim=1)


def begin(
    xs: Sequence[torch.Tensor], outs: Sequence[int], hidden: int, seed: int
) -> list[SecondTerm]:
    """silu terms that add nothing yet (``up`` is zero), one for each group's columns ``xs``
    [num_tokens, width], which set the scale of ``down`` and ``offset``.
    """
    generator = torch.Generator().manual_seed(seed)
    terms = []
    for x, out in zip(xs, outs, strict=True):
        spread = x.std(0).clamp_min(1e-6)
        down = torch.randn(x.shape[1], hidden, generator=generator) / x.shape[1] ** 0.5
        down = down / spread[:, None]
        offset = -(x.mean(0) @ down)
        term = SecondTerm(down, offset, torch.zeros(hidden, out), "silu")
        for tensor in parameters([term]):
            tensor.requires_grad_()
        terms.append(term)
    return terms


def parameters(terms: Sequence[SecondTerm]) -> list[torch.Tensor]:
    return [tensor for term in terms for tensor in (term.down, term.offset, term.up)]


def refined(
    kvmap: KvMap, terms: dict[int, SecondTerm], scale: float, record: dict[str, Any]
) -> KvMap:
    """``kvmap`` with ``terms`` (by group number) times ``scale``; a scale of 0 leaves them out.

    Without evidence: what vouched for the map did not vouch for this one.
    """
    groups = list(kvmap.groups)
    for number, term in terms.items() if scale else ():
        down, offset, up = (tensor.detach().clone() for tensor in parameters([term]))
        second = SecondTerm(down, offset, up * scale, term.activation)
        groups[number] = replace(groups[number], second=second)
    fitted = {**kvmap.fitted, "refined": record}
    return replace(kvmap, groups=tuple(groups), fitted=fitted, evidence=None)
