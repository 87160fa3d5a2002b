"""Adds documents to running moments, and forgets their activations."""

from __future__ import annotations

import torch

from trtllm_kvmap.artifact.moments import MomentPart, Moments
from trtllm_kvmap.calibrate.capture import CapturedKv
from trtllm_kvmap.calibrate.parts import PartPlan
from trtllm_kvmap.spec.slices import Slice

# Gram rows computed at a time: bounds the float32 workspace at this many rows of the gram.
ROWS = 2048


class PartSums:
    """The running sums of one part.

    The products of a document are taken in float32 about the document's own mean and the means put
    back in float64: sum x y^T = sum (x - m)(y - n)^T + T m n^T. Key channels with a large constant
    part would otherwise lose their variation to float32 rounding. Documents are added in float64,
    one at a time, so how they are spread over ranks changes no more than the order of float64 sums.
    """

    def __init__(self, plan: PartPlan, moments: Moments | None = None) -> None:
        self.plan = plan
        moments = moments or Moments.zeros(plan.width, plan.target_width)
        self.gram, self.cross, self.source_sum, self.target_sum, self.target_square = (
            moments.tensors()
        )
        self.count = moments.count

    def add(self, source: CapturedKv, target: CapturedKv, skip_first: int) -> None:
        """Add one document without its first ``skip_first`` tokens."""
        x = _columns(self.plan.slices, source, target)[skip_first:]
        y = _columns(self.plan.targets, source, target)[skip_first:]
        tokens = len(x)
        x_sum, y_sum = x.sum(0, dtype=torch.float64), y.sum(0, dtype=torch.float64)
        x, y = x - (x_sum / tokens).float(), y - (y_sum / tokens).float()
        for start in range(0, self.plan.width, ROWS):
            rows = slice(start, start + ROWS)
            # Only the upper triangle; moments() mirrors it.
            upper = self.gram[rows, start:]
            upper.add_(x[:, rows].T @ x[:, start:])
            upper.addr_(x_sum[rows], x_sum[start:], alpha=1 / tokens)
            cross = self.cross[rows]
            cross.add_(x[:, rows].T @ y)
            cross.addr_(x_sum[rows], y_sum, alpha=1 / tokens)
        self.source_sum.add_(x_sum)
        self.target_sum.add_(y_sum)
        self.target_square.add_(y.square().sum(0, dtype=torch.float64))
        self.target_square.addcmul_(y_sum, y_sum, value=1 / tokens)
        self.count += tokens

    def part(self) -> MomentPart:
        """The moments so far. The tensors are the running sums themselves, not a copy."""
        for start in range(0, self.plan.width, ROWS):
            stop = start + ROWS
            corner = self.gram[start:stop, start:stop]
            corner.copy_(corner.triu() + corner.triu(1).T)
            self.gram[stop:, start:stop] = self.gram[start:stop, stop:].T
        moments = Moments(
            self.gram,
            self.cross,
            self.source_sum,
            self.target_sum,
            self.target_square,
            self.count,
        )
        return MomentPart(self.plan.slices, self.plan.targets, moments)


def _columns(slices: tuple[Slice, ...], source: CapturedKv, target: CapturedKv) -> torch.Tensor:
    """float32 [num_tokens, columns of all slices]."""
    columns = []
    for s in slices:
        kv = source if s.origin == "source" else target
        columns.append((kv.keys if s.field == "key" else kv.values)[s.layer, s.head])
    return torch.cat(columns, dim=1).cpu()
