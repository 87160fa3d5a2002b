"""Backend ``cpu``: torch, float32, on whatever device the pools are.

Each slice is read and un-rotated once into a workspace; heads that read the same slices are one
wide product; the results are rotated together, rounded once and written. Long spans go through in
chunks, so the workspaces stay small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.mapper.contract import Span, check, same_rotation
from trtllm_kvmap.mapper.paging import Places
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.mapper.schedule import Schedule, make_schedule
from trtllm_kvmap.rotary import applying_rows, removing_rows, rotate_
from trtllm_kvmap.spec.layout import SKIP
from trtllm_kvmap.spec.model import ModelSpec

# Long enough for a product to run at full speed, short enough for its workspaces to stay in cache.
CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some tokens of a span, none of them skipped: where they lie, and the rows that turn keys."""

    num_tokens: int
    source: Places
    target: Places
    token_ids: torch.Tensor | None
    removing: tuple[torch.Tensor, torch.Tensor]
    applying: tuple[torch.Tensor, torch.Tensor]


class CpuMapper:
    """See contract. Holds the map's matrices in float32, joined where that makes fewer products."""

    def __init__(self, kvmap: KvMap) -> None:
        self.kvmap = kvmap
        self._schedules: dict[torch.device, tuple[Schedule, Schedule, Schedule]] = {}
        self._schedules_on(torch.device("cpu"))

    @torch.no_grad()
    def map_kv(self, source: KvPool, target: KvPool, span: Span) -> None:
        """Map one span; see contract for shapes, promises and errors."""
        check(self.kvmap, source, target, span)
        computed, copied_keys, copied_values = self._schedules_on(target.device)
        turn = not same_rotation(self.kvmap, span)
        skipped = (span.source_slots.cpu() == SKIP) | (span.target_slots.cpu() == SKIP)
        kept = (~skipped).nonzero()[:, 0]
        for tokens in torch.split(kept, CHUNK_TOKENS) if len(kept) else ():
            chunk = self._chunk(source, target, span, tokens)
            self._run(computed, source, target, chunk, turn=True)
            self._run(copied_keys, source, target, chunk, turn=turn)
            self._run(copied_values, source, target, chunk, turn=False)

    def _schedules_on(self, device: torch.device) -> tuple[Schedule, Schedule, Schedule]:
        """What is computed, which keys are copied, which values are copied; made once a device."""
        if device not in self._schedules:
            parts: dict[str, list[HeadGroup]] = {"computed": [], "key": [], "value": []}
            for group in self.kvmap.groups:
                parts[group.field if _is_plain_copy(group) else "computed"].append(group)
            computed, keys, values = (
                make_schedule(self.kvmap, groups, device) for groups in parts.values()
            )
            self._schedules[device] = computed, keys, values
        return self._schedules[device]

    def _chunk(self, source: KvPool, target: KvPool, span: Span, tokens: torch.Tensor) -> _Chunk:
        device = target.device
        positions = span.positions[tokens].to(device)
        ropes = self.kvmap.source.rope, self.kvmap.target.rope
        return _Chunk(
            num_tokens=len(tokens),
            source=Places.of(span.source_slots[tokens].cpu(), source.tokens_per_block, device),
            target=Places.of(span.target_slots[tokens].cpu(), target.tokens_per_block, device),
            token_ids=None if span.token_ids is None else span.token_ids[tokens].to(device),
            removing=removing_rows(positions, ropes[0], span.source_length, torch.float32),
            applying=applying_rows(positions, ropes[1], span.target_length, torch.float32),
        )

    def _run(
        self, schedule: Schedule, source: KvPool, target: KvPool, chunk: _Chunk, *, turn: bool
    ) -> None:
        """Read, compute and write one chunk; numbers that need no change keep their dtype."""
        if not schedule.products:
            return
        verbatim = not turn and _same_numbers(schedule, source, target)
        dtype = source.dtype if verbatim else torch.float32
        workspace = partial(torch.empty, dtype=dtype, device=target.device)
        inputs = workspace(chunk.num_tokens, schedule.width)
        outputs = workspace(chunk.num_tokens, schedule.out_width)
        self._read(schedule, source, chunk, inputs)
        in_keys, out_keys = inputs[:, : schedule.key_width], outputs[:, : schedule.out_key_width]
        if not verbatim:
            _multiply(in_keys, source.key_scale)
            _multiply(inputs[:, schedule.key_width : schedule.source_width], source.value_scale)
        if turn:
            _rotate(in_keys, chunk.removing, self.kvmap.source)
        for product in schedule.products:
            product.run(inputs, outputs)
        if turn:
            _rotate(out_keys, chunk.applying, self.kvmap.target)
        if not verbatim:
            _multiply(out_keys, 1 / target.key_scale)
            _multiply(outputs[:, schedule.out_key_width :], 1 / target.value_scale)
            if target.dtype == torch.float8_e4m3fn:  # it has no infinity: saturate
                outputs.clamp_(-torch.finfo(target.dtype).max, torch.finfo(target.dtype).max)
        for band in schedule.writes:
            views, _ = target.field(band.first.field)
            rows = _by_head(outputs[:, slice(*band.columns)], band.num_heads)
            chunk.target.write(views[band.first.layer][:, band.heads], rows)

    def _read(
        self, schedule: Schedule, source: KvPool, chunk: _Chunk, inputs: torch.Tensor
    ) -> None:
        table = self.kvmap.token_table
        for band in schedule.reads:
            rows = _by_head(inputs[:, slice(*band.columns)], band.num_heads)
            if band.first.origin == "source":
                views, _ = source.field(band.first.field)
                chunk.source.read(views[band.first.layer][:, band.heads], rows)
            elif table is not None and chunk.token_ids is not None:  # check has seen to both
                own = table.keys if band.first.field == "key" else table.values
                rows.copy_(own[:, band.heads][chunk.token_ids.to(own.device)])


def _is_plain_copy(group: HeadGroup) -> bool:
    """Whether source keys become keys, or source values values, without a matrix."""
    return group.copies and all(
        s.origin == "source" and s.field == group.field for s in group.slices
    )


def _same_numbers(schedule: Schedule, source: KvPool, target: KvPool) -> bool:
    fields = {band.first.field for band in schedule.writes}
    return source.dtype == target.dtype and all(
        source.field(field)[1] == target.field(field)[1] for field in fields
    )


def _rotate(
    columns: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], spec: ModelSpec
) -> None:
    if columns.shape[1]:
        heads = _by_head(columns, columns.shape[1] // spec.head_dim)
        rotate_(heads.transpose(0, 1), *rows, spec.rope.interleaved)


def _by_head(columns: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim] seen as [num_tokens, num_heads, head_dim]."""
    return columns.view(columns.shape[0], num_heads, -1)


def _multiply(columns: torch.Tensor, factor: float) -> None:
    if factor != 1.0:
        columns.mul_(factor)
