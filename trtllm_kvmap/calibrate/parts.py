"""Which columns are summed together: the parts of a set of moments, before any text is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.slices import FIELDS, Field, Slice, own_slices, source_slices


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The slices and targets of one MomentPart; ``width`` and ``target_width`` count their
    columns.
    """

    slices: tuple[Slice, ...]
    targets: tuple[Slice, ...]
    width: int
    target_width: int


def plan_parts(
    source: ModelSpec, target: ModelSpec, config: CalibrationConfig
) -> tuple[PartPlan, ...]:
    """One part for keys and one for values, or one for both (``joint``), or one per head (scope
    head). The target's own layer 0 stands behind the source slices of its field. Weighted rows
    count differently for every layer and field of the target, so each of these is a part.

    Raises MismatchError for scope head with unequal KV heads, InputError for layers the target does
    not have.
    """
    first, last = config.layers or (0, target.num_layers)
    if last > target.num_layers:
        raise InputError(
            f"layers {first} to {last} were asked for, but {target.name} has {target.num_layers}."
        )
    fields: list[tuple[Field, ...]] = [FIELDS] if config.joint else [(f,) for f in FIELDS]
    heads: list[int | None] = [None]
    if config.scope == "head":
        if source.num_kv_heads != target.num_kv_heads:
            raise MismatchError(
                f"scope=head needs equally many KV heads; {source.name} has {source.num_kv_heads} "
                f"and {target.name} {target.num_kv_heads}. Use scope=all."
            )
        heads = list(range(source.num_kv_heads))
    bands = [range(first, last)]
    if config.weighting != "uniform":
        bands = [range(layer, layer + 1) for layer in bands[0]]
    return tuple(
        _part(source, target, group, predicted, head, band)
        for group in fields
        for predicted in ([group] if config.weighting == "uniform" else [(f,) for f in group])
        for head in heads
        for band in bands
    )


def _part(
    source: ModelSpec,
    target: ModelSpec,
    fields: Sequence[Field],
    predicted: Sequence[Field],
    head: int | None,
    layers: range,
) -> PartPlan:
    slices: list[Slice] = []
    targets: list[Slice] = []
    for field in fields:
        slices += source_slices(field, source.num_layers, source.num_kv_heads)
        slices += own_slices(field, target.num_kv_heads)
    for field in predicted:
        targets += [
            Slice("target", field, layer, h) for layer in layers for h in range(target.num_kv_heads)
        ]
    if head is not None:
        slices = [s for s in slices if s.head == head]
        targets = [t for t in targets if t.head == head]
    own = sum(s.origin == "target" for s in slices)
    width = (len(slices) - own) * source.head_dim + own * target.head_dim
    return PartPlan(tuple(slices), tuple(targets), width, len(targets) * target.head_dim)
