"""A map laid out for speed: the heads to read, the products to take, the heads to write.

Two workspaces stand between the pools: the inputs [num_tokens, width] hold every slice that is
read, once, and the outputs [num_tokens, out_width] every target head. In both, keys come first, so
that one pass turns them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.spec.slices import Slice

Columns = tuple[int, int]  # first, one past the last


@dataclass(frozen=True, slots=True)
class Band:
    """``num_heads`` heads of one layer beginning at ``first``, side by side in a workspace."""

    first: Slice
    num_heads: int
    columns: Columns

    @property
    def heads(self) -> slice:
        return slice(self.first.head, self.first.head + self.num_heads)


@dataclass(frozen=True, slots=True)
class Second:
    """A group's second term, with the columns it reads (in the group's own order) and adds to."""

    term: SecondTerm
    parts: tuple[Columns, ...]
    output: Columns


@dataclass(frozen=True, slots=True)
class Product:
    """outputs[:, output] = bias + sum over ``parts`` of inputs[:, part] @ weight, + the second
    terms.

    The weight of a part is float32 [columns of the part, columns of output]. Without a bias the
    parts are laid side by side as they are: a copy.
    """

    parts: tuple[Columns, ...]
    weights: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    output: Columns
    seconds: tuple[Second, ...] = ()

    def run(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        y = outputs[:, slice(*self.output)]
        if self.bias is None:
            torch.cat([inputs[:, slice(*part)] for part in self.parts], dim=1, out=y)
            return
        if self.weights:
            total = self.bias
            for part, weight in zip(self.parts, self.weights, strict=True):
                total = torch.addmm(total, inputs[:, slice(*part)], weight, out=y)
        else:
            y.copy_(self.bias.expand_as(y))
        for second in self.seconds:
            x = torch.cat([inputs[:, slice(*part)] for part in second.parts], dim=1)
            outputs[:, slice(*second.output)] += second.term.run(x)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The products of some head groups of a map, and the bands that feed and drain them.

    Inputs stand in the order source keys, source values, the target's own slices: ``key_width`` and
    ``source_width`` are where the first two end. Outputs are keys up to ``out_key_width``, then
    values.
    """

    reads: tuple[Band, ...]
    products: tuple[Product, ...]
    writes: tuple[Band, ...]
    key_width: int
    source_width: int
    width: int
    out_key_width: int
    out_width: int


def make_schedule(kvmap: KvMap, groups: Iterable[HeadGroup], device: torch.device) -> Schedule:
    """Lay out ``groups``: those of one field that read the same slices become one wide product."""
    alike: dict[tuple[str, tuple[Slice, ...], bool, bool], list[HeadGroup]] = {}
    for group in sorted(groups, key=lambda g: (g.field, g.layer, g.heads)):
        slices = group.slices if group.copies else tuple(sorted(group.slices))
        key = group.field, slices, group.copies, group.weight is None
        alike.setdefault(key, []).append(group)

    # Slices sort by origin, field, layer, head: source keys, source values, own keys, own values.
    read = sorted({s for _, slices, _, _ in alike for s in slices})
    columns = _columns(read, kvmap)
    products: list[Product] = []
    written: list[Slice] = []
    for (_, slices, copied, _), members in alike.items():
        start = len(written) * kvmap.target.head_dim
        written += [Slice("target", g.field, g.layer, head) for g in members for head in g.heads]
        output = start, len(written) * kvmap.target.head_dim
        if copied:
            parts = _joined([columns[s] for s in slices * len(members)])
            products.append(Product(parts, (), None, output))
        else:
            products.append(_multiplied(kvmap, members, columns, output, device))
    out_columns = _columns(written, kvmap)
    sources = [columns[s] for s in read if s.origin == "source"]
    keys = [columns[s] for s in read if s.origin == "source" and s.field == "key"]
    out_keys = [out_columns[s] for s in written if s.field == "key"]
    return Schedule(
        reads=_bands(columns),
        products=tuple(products),
        writes=_bands(out_columns),
        key_width=_end(keys),
        source_width=_end(sources),
        width=_end(columns.values()),
        out_key_width=_end(out_keys),
        out_width=_end(out_columns.values()),
    )


def _multiplied(
    kvmap: KvMap,
    groups: Sequence[HeadGroup],
    columns: dict[Slice, Columns],
    output: Columns,
    device: torch.device,
) -> Product:
    # One group in sorted order is used where it lies: a large map is not held twice.
    weights = [w for group in groups if (w := _rows_in_order(kvmap, group)) is not None]
    parts = _joined([columns[s] for s in sorted(groups[0].slices)]) if weights else ()
    if weights:
        weight = (weights[0] if len(weights) == 1 else torch.cat(weights, dim=1)).to(device)
        weights = list(torch.split(weight, [b - a for a, b in parts]))
    bias = torch.cat([group.bias.float() for group in groups if group.bias is not None]).to(device)
    seconds = _seconds(kvmap, groups, columns, output, device)
    return Product(parts, tuple(weights), bias, output, seconds)


def _seconds(
    kvmap: KvMap,
    groups: Sequence[HeadGroup],
    columns: dict[Slice, Columns],
    output: Columns,
    device: torch.device,
) -> tuple[Second, ...]:
    seconds, start = [], output[0]
    for group in groups:
        stop = start + len(group.heads) * kvmap.target.head_dim
        if group.second is not None:
            parts = _joined([columns[s] for s in group.slices])
            seconds.append(Second(group.second.to(device), parts, (start, stop)))
        start = stop
    return tuple(seconds)


def _rows_in_order(kvmap: KvMap, group: HeadGroup) -> torch.Tensor | None:
    """The weight in float32, its row blocks in the order in which slices sort."""
    weight = group.matrix()
    if weight is None:
        return None
    blocks = torch.split(weight, [kvmap.slice_width(s) for s in group.slices])
    order = sorted(range(len(blocks)), key=lambda index: group.slices[index])
    if order == list(range(len(blocks))):
        return weight
    return torch.cat([blocks[index] for index in order])


def _columns(slices: Sequence[Slice], kvmap: KvMap) -> dict[Slice, Columns]:
    """Places side by side, in the order given."""
    columns, end = {}, 0
    for s in slices:
        columns[s] = end, end + kvmap.slice_width(s)
        end += kvmap.slice_width(s)
    return columns


def _bands(columns: dict[Slice, Columns]) -> tuple[Band, ...]:
    bands: list[Band] = []
    for s, (a, b) in columns.items():
        last = bands[-1] if bands else None
        if last and s == replace(last.first, head=last.heads.stop):
            bands[-1] = Band(last.first, last.num_heads + 1, (last.columns[0], b))
        else:
            bands.append(Band(s, 1, (a, b)))
    return tuple(bands)


def _joined(parts: Sequence[Columns]) -> tuple[Columns, ...]:
    joined: list[Columns] = []
    for a, b in parts:
        if joined and joined[-1][1] == a:
            joined[-1] = joined[-1][0], b
        else:
            joined.append((a, b))
    return tuple(joined)


def _end(columns: Iterable[Columns]) -> int:
    return max((b for _, b in columns), default=0)
