"""A matrix of low rank in place of a fitted one, cut where it costs the target least.

Cutting the singular values of W alone loses what is small in W, not what matters little. An error E
of the weights makes an error E^T x of a key or value, which costs e^T M e (M: the moments' metric).
Over the text that is tr(M E^T G E) = |L^T E S|^2 with the gram G = L L^T and M = S S^T, so the best
matrix of rank r is the truncated SVD of L^T W S, taken back (Eckart and Young, 1936).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.fit.centred import CentredPart, describe
from trtllm_kvmap.fit.ridge import Factor
from trtllm_kvmap.spec.slices import Slice

# A metric is the cost of small errors; those of a low rank are not small, and then every direction
# counts. Measured on the tiny family: the metric alone (1e-4 of its mean diagonal added) cuts worse
# than the error of keys and values, half and half (1.0) as well or better at most ranks.
EVERY_DIRECTION = 1.0


def truncate(
    factor: Factor, weight: torch.Tensor, targets: Sequence[Slice], rank: int, by: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(down [columns, rank], up [rank, target columns]), float64, whose product replaces
    ``weight``.

    ``by`` plain cuts the weight's own singular values; data, the error of keys and values over the
    text; output, what that error costs the target. Raises MismatchError for output without a
    metric: the moments were not weighed by sensitivity.
    """
    if by == "plain":
        u, s, vt = torch.linalg.svd(weight, full_matrices=False)
        return u[:, :rank] * s[:rank], vt[:rank]
    root = _root(factor.part, targets) if by == "output" else None
    scaled = factor.cholesky.T @ weight
    if root is not None:
        scaled = scaled @ root
    u, s, vt = torch.linalg.svd(scaled, full_matrices=False)
    down = torch.linalg.solve_triangular(factor.cholesky.T, u[:, :rank] * s[:rank], upper=True)
    up = vt[:rank]
    if root is not None:
        up = torch.linalg.solve_triangular(root, up, upper=False, left=False)
    return down, up


def _root(part: CentredPart, targets: Sequence[Slice]) -> torch.Tensor:
    """The lower Cholesky root of the targets' metrics, one block for each head."""
    metric = part.metric(targets)
    if metric is None:
        raise MismatchError(
            f"A low rank cut by output needs to know what an error of the {describe(targets)} "
            f"costs; calibrate with weighting sensitivity, or cut by data."
        )
    mean = metric.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-30)
    metric = metric / mean + EVERY_DIRECTION * torch.eye(metric.shape[1], dtype=metric.dtype)
    root: torch.Tensor = torch.block_diag(*torch.linalg.cholesky(metric))  # type: ignore[no-untyped-call]
    return root
