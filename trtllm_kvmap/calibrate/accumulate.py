"""Adds documents to running moments, and forgets their activations."""

from __future__ import annotations

import torch

from trtllm_kvmap.artifact.moments import MomentPart, Moments
from trtllm_kvmap.calibrate.capture import CapturedKv
from trtllm_kvmap.calibrate.parts import PartPlan
from trtllm_kvmap.calibrate.regard import Regard, row_weights
from trtllm_kvmap.spec.slices import Slice

# Gram rows computed at a time: bounds the float32 workspace at this many rows of the gram.
ROWS = 2048


class PartSums:
    """The running sums of one part.

    The products of a document are taken in float32 about the document's own mean and the means put
    back in float64: sum x y^T = sum (x - m)(y - n)^T + T m n^T. Key channels with a large constant
    part would otherwise lose their variation to float32 rounding. Documents are added in float64,
    one at a time, so how they are spread over ranks changes no more than the order of float64 sums.

    When rows are ``weighted``, ``cost`` float64 [targets, head_dim, head_dim] adds up what errors
    of each target slice cost (regard.py).
    """

    def __init__(
        self, plan: PartPlan, *, weighted: bool = False, saved: MomentPart | None = None
    ) -> None:
        self.plan = plan
        moments = saved.moments if saved else Moments.zeros(plan.width, plan.target_width)
        self.gram, self.cross, self.source_sum, self.target_sum, self.target_square = (
            moments.tensors()
        )
        self.count = moments.count
        self.cost = saved.cost if saved else None
        if weighted and self.cost is None:
            head_dim = plan.target_width // len(plan.targets)
            shape = len(plan.targets), head_dim, head_dim
            self.cost = torch.zeros(shape, dtype=torch.float64)

    def tensors(self) -> list[torch.Tensor]:
        """Everything that adds up, but the count."""
        sums = [self.gram, self.cross, self.source_sum, self.target_sum, self.target_square]
        return sums if self.cost is None else [*sums, self.cost]

    def add(
        self,
        source: CapturedKv,
        target: CapturedKv,
        skip_first: int,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Add one document without its first ``skip_first`` tokens. ``weights``: float32
        [num_tokens], one for each of the rest, mean 1; None: all 1.
        """
        x = _columns(self.plan.slices, source, target)[skip_first:]
        y = _columns(self.plan.targets, source, target)[skip_first:]

        def weighed(rows: torch.Tensor) -> torch.Tensor:
            return rows if weights is None else rows * weights[:, None]

        tokens = len(x)  # and the sum of the weights
        x_sum = weighed(x).sum(0, dtype=torch.float64)
        y_sum = weighed(y).sum(0, dtype=torch.float64)
        x, y = x - (x_sum / tokens).float(), y - (y_sum / tokens).float()
        weighed_x = weighed(x)
        for start in range(0, self.plan.width, ROWS):
            rows = slice(start, start + ROWS)
            # Only the upper triangle; part() mirrors it.
            upper = self.gram[rows, start:]
            upper.add_(weighed_x[:, rows].T @ x[:, start:])
            upper.addr_(x_sum[rows], x_sum[start:], alpha=1 / tokens)
            cross = self.cross[rows]
            cross.add_(weighed_x[:, rows].T @ y)
            cross.addr_(x_sum[rows], y_sum, alpha=1 / tokens)
        self.source_sum.add_(x_sum)
        self.target_sum.add_(y_sum)
        self.target_square.add_(weighed(y.square()).sum(0, dtype=torch.float64))
        self.target_square.addcmul_(y_sum, y_sum, value=1 / tokens)
        self.count += tokens

    def add_regard(self, regard: Regard, skip_first: int, ess_floor: float) -> torch.Tensor:
        """Add up what errors cost; returns the document's weights for add."""
        squares = torch.zeros(())
        for number, t in enumerate(self.plan.targets):
            squares = squares + regard.rows[t.field][t.layer, t.head, skip_first:].cpu()
            if self.cost is not None:
                self.cost[number].add_(regard.cost[t.field][t.layer, t.head])
        return row_weights(squares, ess_floor)

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
        return MomentPart(self.plan.slices, self.plan.targets, moments, self.cost)


def _columns(slices: tuple[Slice, ...], source: CapturedKv, target: CapturedKv) -> torch.Tensor:
    """float32 [num_tokens, columns of all slices]."""
    columns = []
    for s in slices:
        kv = source if s.origin == "source" else target
        columns.append((kv.keys if s.field == "key" else kv.values)[s.layer, s.head])
    return torch.cat(columns, dim=1).cpu()
