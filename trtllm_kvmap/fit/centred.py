"""One part's moments about their means, by slice: what every solver reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trtllm_kvmap.artifact.moments import MomentPart
from trtllm_kvmap.errors import NumericsError
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.slices import FIELDS, Field, Slice

# A slice whose variance is below this share of its mean square is constant up to rounding: the
# bias says all it could say.
CONSTANT = 1e-12


class CentredPart:
    """Sub-blocks of a MomentPart with the means taken off, which makes the bias free.

    Blocks are cut out on request, so the large gram is never copied as a whole unless a scope asks
    for all of it. All results are float64 and new tensors. Raises NumericsError for moments without
    tokens or with NaN or infinity in them.
    """

    def __init__(self, part: MomentPart, source: ModelSpec, target: ModelSpec) -> None:
        self.slices, self.targets, self.moments = part.slices, part.targets, part.moments
        self.source, self.target, self.count = source, target, part.moments.count
        self._cost = part.cost
        self._columns = _ranges(part.slices, source, target)
        self._target_columns = _ranges(part.targets, source, target)
        self._require_sound()
        moments = part.moments
        self.source_mean = moments.source_sum / self.count
        self.target_mean = moments.target_sum / self.count
        square = moments.gram.diagonal()
        variance = square - moments.source_sum * self.source_mean
        self._variance = {s: float(variance[i:j].mean()) for s, (i, j) in self._columns.items()}
        self._square = {s: float(square[i:j].mean()) for s, (i, j) in self._columns.items()}

    def columns(self, slices: Sequence[Slice]) -> torch.Tensor:
        """int64: the source columns of ``slices``, in their order."""
        return _index(self._columns, slices)

    def target_columns(self, targets: Sequence[Slice]) -> torch.Tensor:
        return _index(self._target_columns, targets)

    def target_fields(self) -> list[Field]:
        return [field for field in FIELDS if any(t.field == field for t in self.targets)]

    def varies(self, s: Slice) -> bool:
        """False for a slice that is constant over the text."""
        return self._variance[s] > CONSTANT * self._square[s]

    def gram(self, slices: Sequence[Slice]) -> torch.Tensor:
        """sum (x - mean) (x - mean)^T over tokens, [columns, columns]."""
        ranges = _merged(self._columns, slices)
        total = self.moments.source_sum[self.columns(slices)]
        gram = _cut(self.moments.gram, ranges, ranges)
        return gram.addr_(total, total, alpha=-1.0 / self.count)

    def cross(self, slices: Sequence[Slice], targets: Sequence[Slice]) -> torch.Tensor:
        """sum (x - mean) (y - mean)^T over tokens, [source columns, target columns]."""
        rows, columns = _merged(self._columns, slices), _merged(self._target_columns, targets)
        total = self.moments.source_sum[self.columns(slices)]
        target_total = self.moments.target_sum[self.target_columns(targets)]
        cross = _cut(self.moments.cross, rows, columns)
        return cross.addr_(total, target_total, alpha=-1.0 / self.count)

    def target_variance(self, targets: Sequence[Slice]) -> torch.Tensor:
        """sum (y - mean)^2 over tokens, [target columns]."""
        index = self.target_columns(targets)
        total = self.moments.target_sum[index]
        return (self.moments.target_square[index] - total * total / self.count).clamp_(min=0.0)

    def cost(self, targets: Sequence[Slice]) -> torch.Tensor | None:
        """What an error of each target slice costs, [targets, head_dim, head_dim]; None unless the
        moments were weighed.
        """
        if self._cost is None:
            return None
        return self._cost[[self.targets.index(t) for t in targets]]

    def penalty(self, slices: Sequence[Slice], ridge: float) -> torch.Tensor:
        """``ridge`` times the mean diagonal of the slice's own centred gram, one entry per column.

        One mean over all slices would starve those that are small in absolute terms.
        """
        entries = []
        for s in slices:
            start, stop = self._columns[s]
            value = ridge * self._variance[s]
            entries.append(torch.full((stop - start,), value, dtype=torch.float64))
        return torch.cat(entries)

    def _require_sound(self) -> None:
        if self.count < 1:
            raise NumericsError(
                f"The moments of {describe(self.targets)} hold no tokens; calibrate on some text."
            )
        # A sum is finite only if all of its terms are, and needs no second copy of a large gram.
        if not all(math.isfinite(float(tensor.sum())) for tensor in self.moments.tensors()):
            raise NumericsError(
                f"The moments of {describe(self.targets)} hold NaN or infinity: a model computed "
                f"them from damaged weights or overflowed. Check both models and calibrate again."
            )


def describe(targets: Sequence[Slice]) -> str:
    """``keys of target layers 0 to 27, heads 0 to 1``, for messages."""
    fields = " and ".join(f"{field}s" for field in FIELDS if any(t.field == field for t in targets))
    layers, heads = {t.layer for t in targets}, {t.head for t in targets}
    return f"{fields} of target {_span('layer', layers)}, {_span('head', heads)}"


def _span(word: str, numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{word} {low}" if low == high else f"{word}s {low} to {high}"


def _ranges(
    slices: Sequence[Slice], source: ModelSpec, target: ModelSpec
) -> dict[Slice, tuple[int, int]]:
    ranges, start = {}, 0
    for s in slices:
        width = source.head_dim if s.origin == "source" else target.head_dim
        ranges[s] = (start, start + width)
        start += width
    return ranges


def _index(ranges: dict[Slice, tuple[int, int]], slices: Sequence[Slice]) -> torch.Tensor:
    return torch.cat([torch.arange(*ranges[s]) for s in slices])


def _merged(ranges: dict[Slice, tuple[int, int]], slices: Sequence[Slice]) -> list[tuple[int, int]]:
    """The column ranges of ``slices`` in order, neighbours joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in (ranges[s] for s in slices):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _cut(
    matrix: torch.Tensor, rows: list[tuple[int, int]], columns: list[tuple[int, int]]
) -> torch.Tensor:
    """A new matrix of these rows and columns. Copies rectangles, many times faster than an index
    per column.
    """
    return torch.cat([torch.cat([matrix[a:b, c:d] for c, d in columns], dim=1) for a, b in rows])
