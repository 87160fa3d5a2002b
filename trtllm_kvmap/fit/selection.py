"""Forward selection of column blocks on a gram: the one search behind `head`, `pooled` and `slice`.

Each step adds the block that lowers the ridge objective most. With S the blocks chosen so far, the
gain of a candidate j is ``trace(R_j^T D_j^-1 R_j)``, where D_j is the Schur complement of the
penalised gram at block j given S, and R_j the cross with what S leaves unexplained. Both are kept
current by appending the new block's rows to the Cholesky factor and down-dating every candidate, so
no step solves from scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from trtllm_kvmap.fit.ridge import SMALLEST_PIVOT


@dataclass(slots=True)
class _Run:
    """Neighbouring candidate blocks of one width, handled as a batch."""

    first: int  # block number
    start: int  # column
    width: int
    number: int
    schur: torch.Tensor  # [number, width, width]
    floor: torch.Tensor  # [number, width], the smallest squared pivots that are not rounding

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.number * self.width)


def select_blocks(
    gram: torch.Tensor, cross: torch.Tensor, widths: Sequence[int], count: int
) -> list[int]:
    """Numbers of at most ``count`` blocks, in the order chosen; ties go to the lower number.

    gram [F, F]: centred, penalty on its diagonal; cross [F, T]: centred; float64. ``widths`` cut
    the F columns into candidate blocks. Blocks that are combinations of chosen ones (possible only
    without a ridge) are passed over, so fewer than ``count`` may come back.
    """
    runs = _runs(gram, widths)
    residual = cross.clone()
    chosen: list[int] = []
    # Rows of L^-1 gram, one per chosen column; ``used`` of them are filled.
    rows, used = gram.new_empty(count * max(widths), gram.shape[0]), 0
    while len(chosen) < count:
        best = _best(runs, residual, chosen)
        if best is None:
            break
        chosen.append(best[0])
        if len(chosen) == count:
            break
        _, columns, lower, explained = best
        new = torch.addmm(gram[columns], rows[:used, columns].T, rows[:used], alpha=-1.0)
        new = torch.linalg.solve_triangular(lower, new, upper=False)
        rows[used : used + len(new)] = new
        used += len(new)
        residual.addmm_(new.T, explained, alpha=-1.0)
        for run in runs:
            part = new[:, run.columns].view(-1, run.number, run.width).permute(1, 2, 0)
            run.schur.baddbmm_(part, part.mT, alpha=-1.0)
    return chosen


def _best(
    runs: list[_Run], residual: torch.Tensor, chosen: list[int]
) -> tuple[int, slice, torch.Tensor, torch.Tensor] | None:
    """The block of the largest gain: its number, columns, Cholesky factor L of D, and L^-1 R."""
    best, largest = None, float("-inf")
    for run in runs:
        lower, info = torch.linalg.cholesky_ex(run.schur)
        block = residual[run.columns].view(run.number, run.width, -1)
        explained = torch.linalg.solve_triangular(lower, block, upper=False)
        gains = explained.square().sum((1, 2))
        pivots = lower.diagonal(dim1=1, dim2=2).square()
        usable = (info == 0) & (pivots > run.floor).all(1)
        for i, gain in enumerate(gains.where(usable, float("-inf")).tolist()):
            if gain > largest and run.first + i not in chosen:
                start = run.start + i * run.width
                columns = slice(start, start + run.width)
                best, largest = (run.first + i, columns, lower[i], explained[i]), gain
    return best


def _runs(gram: torch.Tensor, widths: Sequence[int]) -> list[_Run]:
    runs, first, start = [], 0, 0
    for width, group in groupby(widths):
        number = len(list(group))
        schur = torch.stack(
            [
                gram[i : i + width, i : i + width]
                for i in range(start, start + number * width, width)
            ]
        )
        floor = SMALLEST_PIVOT * schur.diagonal(dim1=1, dim2=2)
        runs.append(_Run(first, start, width, number, schur, floor))
        first, start = first + number, start + number * width
    return runs
