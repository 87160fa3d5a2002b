"""From candidate blocks of slices to fitted groups of target heads: select, then solve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.errors import InputError, MismatchError, NumericsError
from trtllm_kvmap.fit.centred import CONSTANT, CentredPart, describe
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.fit.lowrank import truncate
from trtllm_kvmap.fit.ridge import Factor, factorise, r2_of, singular_error
from trtllm_kvmap.fit.selection import select_blocks
from trtllm_kvmap.spec.slices import FIELDS, Field, Slice

Block = tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class FittedGroup:
    """A group of the map and the training R2 of each of its heads."""

    group: HeadGroup
    r2: tuple[float, ...]


def readable_slices(part: CentredPart, field: Field, config: FitConfig) -> list[Slice]:
    """The source slices that a target head of ``field`` may read, in the order of the moments."""
    wanted = FIELDS if config.fields == "both" else (field,)
    slices = [s for s in part.slices if s.origin == "source" and s.field in wanted]
    if len({s.field for s in slices}) < len(wanted):
        raise MismatchError(
            f"The moments of {describe(part.targets)} do not hold both keys and values as sources; "
            f"calibrate with joint on (--joint), or fit with fields=same."
        )
    return slices


def targets_by_layer(part: CentredPart, field: Field) -> list[Block]:
    """The part's target heads of one field, one block per layer."""
    layers: dict[int, list[Slice]] = {}
    for t in part.targets:
        if t.field == field:
            layers.setdefault(t.layer, []).append(t)
    return [tuple(heads) for heads in layers.values()]


def fit_blocks(
    part: CentredPart,
    blocks: Sequence[Block],
    groups: Sequence[Block],
    count: int,
    config: FitConfig,
) -> Iterator[FittedGroup]:
    """One group per entry of ``groups`` (target heads of one layer and field), reading the best
    ``count`` of ``blocks``.

    Raises InputError when ``count`` exceeds the number of blocks, NumericsError when no answer can
    be trusted.
    """
    if count > len(blocks):
        name, what = ("n", "slices") if config.scope == "slice" else ("k", "layers")
        raise InputError(
            f"{name} must be at most {len(blocks)}: {count} {what} are to be read by the "
            f"{describe(groups[0])}, and the moments offer no more."
        )
    blocks = [varying for b in blocks if (varying := tuple(s for s in b if part.varies(s)))]
    if not blocks:
        raise NumericsError(
            f"Every slice that the {describe(groups[0])} may read is constant over the text; "
            f"calibrate on more varied text."
        )
    everything = [s for block in blocks for s in block]
    if count >= len(blocks):  # nothing to choose: one factor serves every group
        factor = factorise(part, everything, config.ridge, groups[0])
        for targets in groups:
            yield _fitted(factor, targets, config)
        return
    gram = part.gram(everything)
    gram.diagonal().add_(part.penalty(everything, config.ridge))
    widths = [part.columns(block).numel() for block in blocks]
    for targets in groups:
        chosen = select_blocks(gram, part.cross(everything, targets), widths, count)
        if not chosen:
            raise singular_error(part, everything, config.ridge, targets)
        slices = tuple(s for number in chosen for s in blocks[number])
        yield _fitted(factorise(part, slices, config.ridge, targets), targets, config)


def _fitted(factor: Factor, targets: Block, config: FitConfig) -> FittedGroup:
    solution = factor.solve(targets)
    weight, second = solution.weight, None
    if config.rank > min(weight.shape):
        raise InputError(
            f"rank must be at most {min(weight.shape)}, got {config.rank}: the matrix of the "
            f"{describe(targets)} is {weight.shape[0]} x {weight.shape[1]}."
        )
    if 0 < config.rank < min(weight.shape):
        down, up = truncate(factor, weight, targets, config.rank, config.cut)
        solution = factor.judge(down @ up, targets)
        second = SecondTerm(down.float(), torch.zeros(config.rank), up.float(), "identity")
    stored, scale = (None, None) if second else store(solution.weight, config.dtype)
    if stored is not None and not bool(torch.isfinite(stored.float()).all()):
        raise NumericsError(
            f"The weights for the {describe(targets)} do not fit into {config.dtype}; store them "
            f"as float32 or bfloat16, or raise the ridge."
        )
    matrices = [stored] if second is None else [second.down, second.up]
    reads = all(m is not None and bool(m.float().any()) for m in matrices)
    if not reads and _vary(factor.part, targets):
        raise NumericsError(
            f"All weights for the {describe(targets)} are zero: with a ridge of {config.ridge:g} "
            f"the map would read nothing and put the mean everywhere. Fit with a smaller ridge."
        )
    group = HeadGroup(
        field=targets[0].field,
        layer=targets[0].layer,
        heads=tuple(t.head for t in targets),
        slices=factor.slices,
        weight=stored,
        bias=solution.bias.float(),
        weight_scale=scale,
        second=second,
    )
    errors, variances = (x.chunk(len(targets)) for x in (solution.error, solution.variance))
    return FittedGroup(group, tuple(map(r2_of, errors, variances)))


def _vary(part: CentredPart, targets: Block) -> bool:
    """False for target heads that are constant over the text: their bias alone is exact."""
    square = part.moments.target_square[part.target_columns(targets)]
    return bool(part.target_variance(targets).sum() > CONSTANT * square.sum())


def store(weight: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``weight`` in the type it is stored in; for float8 with the scale of each column, which
    brings its largest entry to the largest number that the type has.
    """
    kind: torch.dtype = getattr(torch, dtype)
    if kind != torch.float8_e4m3fn:
        return weight.to(kind), None
    scale = (weight.abs().amax(0) / torch.finfo(kind).max).clamp_min(1e-30).float()
    return (weight / scale).to(kind), scale
