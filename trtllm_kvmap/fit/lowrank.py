"""A matrix of low rank in place of a fitted one, cut where it costs the target least.

An error E of the weights makes an error E^T x of a key or value. Over inputs with the gram G, and
with an error e costing e^T M e, that is tr(M E^T G E); the best matrix of rank r keeps the first r
eigenvectors v of R (W^T G W) R, where R R = M, and is W R v v^T R^-1 (Eckart and Young, 1936). So a
cut is a choice of output directions, and all that it needs to know of the text is W^T G W.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.fit.centred import CentredPart, describe
from trtllm_kvmap.fit.ridge import Factor
from trtllm_kvmap.spec.slices import Slice

# Half of the cost is what the target's queries and output projection make of an error, half is
# the error itself: they were measured on some text, and the errors of a low rank go everywhere.
EVERY_DIRECTION = 1.0
# Below this share of the mean, an eigenvalue is rounding.
SMALLEST = 1e-9


def truncate(
    factor: Factor, weight: torch.Tensor, targets: Sequence[Slice], rank: int, by: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(down [columns, rank], up [rank, target columns]), float64, whose product replaces
    ``weight``.

    ``by`` plain takes all inputs for alike (W^T W: the weight's own singular values); data, as they
    vary over the text (W^T G W: least error of keys and values); output, the geometric mean of the
    two, and errors by what they cost the target. The text alone would give up what few tokens need,
    and these are the ones that questions are about.

    Raises MismatchError for output without a cost: the moments were not weighed.
    """
    kept = weight.T @ weight
    if by != "plain":
        # The normal equations: W^T (G + penalty) W.
        varied = _symmetric(weight.T @ factor.part.cross(factor.slices, targets))
        kept = varied if by == "data" else geometric_mean(kept, varied)
    root = inverse = torch.eye(len(kept), dtype=kept.dtype)
    if by == "output":
        cost = _cost(factor.part, targets)
        root, inverse = power(cost, 0.5), power(cost, -0.5)
    directions = torch.linalg.eigh(_symmetric(root @ kept @ root))[1].flip(1)[:, :rank]
    return weight @ (root @ directions), directions.T @ inverse


def geometric_mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A^1/2 (A^-1/2 B A^-1/2)^1/2 A^1/2 of two symmetric matrices without negative eigenvalues
    (Pusz and Woronowicz, 1975). Where they commute, the square root of their product.
    """
    root, inverse = power(a, 0.5), power(a, -0.5)
    return root @ power(_symmetric(inverse @ b @ inverse), 0.5) @ root


def power(a: torch.Tensor, exponent: float) -> torch.Tensor:
    """A^exponent of a symmetric matrix, its smallest eigenvalues raised to SMALLEST of the mean."""
    values, vectors = torch.linalg.eigh(a)
    values = values.clamp_min(SMALLEST * max(float(values.mean()), 1e-300))
    raised: torch.Tensor = (vectors * values**exponent) @ vectors.T
    return raised


def _cost(part: CentredPart, targets: Sequence[Slice]) -> torch.Tensor:
    """What an error of the targets costs, [target columns, target columns], one block a head."""
    cost = part.cost(targets)
    if cost is None:
        raise MismatchError(
            f"A low rank cut by output needs to know what an error of the {describe(targets)} "
            f"costs; calibrate with weighting sensitivity or attention, or cut by data."
        )
    mean = cost.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-300)
    blocks: torch.Tensor = torch.block_diag(*(cost / mean))  # type: ignore[no-untyped-call]
    blocks.diagonal().add_(EVERY_DIRECTION)
    return blocks


def _symmetric(a: torch.Tensor) -> torch.Tensor:
    return (a + a.T) / 2
