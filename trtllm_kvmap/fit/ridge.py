"""Ridge regression from moments: one Cholesky factor, any number of target heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.errors import NumericsError
from trtllm_kvmap.fit.centred import CentredPart, describe
from trtllm_kvmap.spec.slices import Slice

# A squared pivot below this share of its diagonal entry is rounding, not information. It lies far
# under any useful ridge.
SMALLEST_PIVOT = 1e-13


@dataclass(frozen=True, slots=True)
class Solution:
    """weight [source columns, target columns] and bias [target columns]; ``error`` and ``variance``
    are the squared training error and the centred square of each target column, summed over tokens.
    All float64.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    error: torch.Tensor
    variance: torch.Tensor


@dataclass(frozen=True, slots=True)
class Factor:
    """The lower Cholesky factor of ``centred gram + diag(penalty)`` for an ordered list of slices,
    [columns, columns].
    """

    part: CentredPart
    slices: tuple[Slice, ...]
    ridge: float
    penalty: torch.Tensor
    cholesky: torch.Tensor

    def solve(self, targets: Sequence[Slice]) -> Solution:
        """The W and b that minimise ``sum |y - W^T x - b|^2 + sum_j penalty_j |W_j|^2`` over the
        calibration tokens, for all ``targets`` at once.
        """
        part = self.part
        cross = part.cross(self.slices, targets)
        weight = torch.cholesky_solve(cross, self.cholesky)
        if not bool(torch.isfinite(weight).all()):
            raise singular_error(part, self.slices, self.ridge, targets)
        # variance - 2 W.C + W.(G W), where the normal equations (G + P) W = C replace G W.
        explained = (weight * cross).sum(0) + (self.penalty[:, None] * weight.square()).sum(0)
        return self._solution(weight, targets, explained)

    def judge(self, weight: torch.Tensor, targets: Sequence[Slice]) -> Solution:
        """Another ``weight`` for the same slices, with its best bias and what it leaves."""
        cross = self.part.cross(self.slices, targets)
        penalised = (self.penalty[:, None] * weight.square()).sum(0)
        squares = (self.cholesky.T @ weight).square().sum(0) - penalised  # W.(G W)
        return self._solution(weight, targets, 2 * (weight * cross).sum(0) - squares)

    def _solution(
        self, weight: torch.Tensor, targets: Sequence[Slice], explained: torch.Tensor
    ) -> Solution:
        part = self.part
        mean = part.source_mean[part.columns(self.slices)]
        bias = part.target_mean[part.target_columns(targets)] - weight.T @ mean
        variance = part.target_variance(targets)
        return Solution(weight, bias, (variance - explained).clamp_(min=0.0), variance)


def factorise(
    part: CentredPart, slices: Sequence[Slice], ridge: float, targets: Sequence[Slice]
) -> Factor:
    """Raises NumericsError for a singular system; ``targets`` names the heads in its message."""
    penalty = part.penalty(slices, ridge)
    gram = part.gram(slices)
    gram.diagonal().add_(penalty)
    cholesky, info = torch.linalg.cholesky_ex(gram)
    if int(info) or not bool(
        (cholesky.diagonal().square() > SMALLEST_PIVOT * gram.diagonal()).all()
    ):
        raise singular_error(part, slices, ridge, targets)
    return Factor(part, tuple(slices), ridge, penalty, cholesky)


def singular_error(
    part: CentredPart, slices: Sequence[Slice], ridge: float, targets: Sequence[Slice]
) -> NumericsError:
    return NumericsError(
        f"The system for the {describe(targets)} is singular: {len(slices)} slices with "
        f"{part.columns(slices).numel()} columns, {part.count} tokens, ridge {ridge:g}. Raise the "
        f"ridge (1e-4, say), or calibrate on more text."
    )


def r2_of(error: torch.Tensor, variance: torch.Tensor) -> float:
    """1 - error / variance over all given columns; 1 for columns that never vary (the bias is
    exact).
    """
    total = float(variance.sum())
    return 1.0 - float(error.sum()) / total if total > 0 else 1.0
