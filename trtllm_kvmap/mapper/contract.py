"""The contract ``map_kv``: what every backend promises, and the checks that stand before every one
of them.

For every target layer and every token of the span: read the map's slices at the token's source
slot, remove the source's RoPE at its position, multiply accumulating in float32 or wider, add the
bias, apply the target's RoPE at the same position, round once to the target's dtype, write to the
token's target slot. A token with a slot of -1 on either side is skipped. No byte outside the named
slots changes. An empty span is legal.

A copied head (no matrix) whose numbers need not change keeps its very bits: that is so when dtype
and scale are equal on both sides and, for keys, the rotation too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import SKIP


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one map: int64 tensors [num_tokens].

    ``source_slots`` and ``target_slots`` say where each token lies in the two pools (-1: skip it),
    ``positions`` at which position its keys were and will be rotated. ``token_ids`` is needed by
    maps that read the target's own layer 0. ``source_length`` and ``target_length`` are the
    sequence lengths at which the keys were, or would have been, written: they choose the
    frequencies of length-dependent RoPE kinds (see spec.rope.written_length).
    """

    source_slots: torch.Tensor
    target_slots: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor | None = None
    source_length: int = 0
    target_length: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])


class Mapper(Protocol):
    """A map made ready for one backend. Calling it any number of times changes nothing but the
    named slots.
    """

    @property
    def kvmap(self) -> KvMap: ...

    def map_kv(self, source: KvPool, target: KvPool, span: Span) -> None: ...


def same_rotation(kvmap: KvMap, span: Span) -> bool:
    """Whether source and target rotate the keys of this span by the same angles and scale."""
    source, target = kvmap.source.rope, kvmap.target.rope
    lengths = span.source_length, span.target_length
    return source == target and source.regime(lengths[0]) == target.regime(lengths[1])


def check(kvmap: KvMap, source: KvPool, target: KvPool, span: Span) -> None:
    """Raise MismatchError or InputError before anything is written, or return."""
    for what, pool, spec in (("source", source, kvmap.source), ("target", target, kvmap.target)):
        if pool.kv_shape != spec.kv_shape:
            raise MismatchError(
                f"The {what} pool holds (layers, KV heads, head_dim) = {pool.kv_shape}; the map "
                f"needs {spec.kv_shape}."
            )
    if source.device != target.device:
        raise MismatchError(
            f"The pools lie on {source.device} and {target.device}; put both on one device."
        )
    if _addresses(source) & _addresses(target):
        raise MismatchError(
            "Source and target pool lie in the same memory, so writing one would spoil the other; "
            "give the target a pool of its own."
        )
    _check_positions(kvmap, span)
    _check_slots("source", span.source_slots, span.num_tokens, source)
    written = _check_slots("target", span.target_slots, span.num_tokens, target)
    if written.numel() != torch.unique(written).numel():
        raise InputError(
            "A target slot is named twice in one span; every token needs a slot of its own."
        )
    _check_token_ids(kvmap, span)


def _addresses(pool: KvPool) -> set[int]:
    """Where the views begin; an empty view begins nowhere (0)."""
    return {view.data_ptr() for view in (*pool.keys, *pool.values)} - {0}


def _check_slots(what: str, slots: torch.Tensor, num_tokens: int, pool: KvPool) -> torch.Tensor:
    if slots.shape != (num_tokens,) or slots.dtype != torch.int64:
        raise InputError(
            f"{what}_slots must be int64 of shape ({num_tokens},), one per position; got "
            f"{slots.dtype} of "
            f"{tuple(slots.shape)}."
        )
    used = slots[slots != SKIP]
    if used.numel() and (int(used.min()) < 0 or int(used.max()) >= pool.num_slots):
        raise InputError(
            f"{what}_slots reach from {int(used.min())} to {int(used.max())}; the pool has slots "
            f"0 to "
            f"{pool.num_slots - 1}, and -1 skips a token."
        )
    return used


def _check_positions(kvmap: KvMap, span: Span) -> None:
    if span.positions.ndim != 1 or span.positions.dtype != torch.int64:
        raise InputError(
            f"positions must be int64 [num_tokens]; got {span.positions.dtype} of "
            f"{tuple(span.positions.shape)}."
        )
    limit = min(kvmap.source.max_positions, kvmap.target.max_positions)
    if span.num_tokens and not 0 <= int(span.positions.min()) <= int(span.positions.max()) < limit:
        raise InputError(
            f"positions reach from {int(span.positions.min())} to {int(span.positions.max())}; "
            f"both models allow 0 to "
            f"{limit - 1}."
        )
    end = int(span.positions.max()) + 1 if span.num_tokens else 0
    for what, rope, length in (
        ("source", kvmap.source.rope, span.source_length),
        ("target", kvmap.target.rope, span.target_length),
    ):
        if rope.length_dependent and length < end:
            raise InputError(
                f"The {what} uses {rope.kind} RoPE, whose frequencies depend on the length of the "
                f"sequence: give {what}_length, at least {end} tokens for these positions; got "
                f"{length}."
            )


def _check_token_ids(kvmap: KvMap, span: Span) -> None:
    if not kvmap.reads_token_ids or kvmap.token_table is None:
        return
    ids, known = span.token_ids, int(kvmap.token_table.keys.shape[0])
    if ids is None or ids.shape != span.positions.shape or ids.dtype != torch.int64:
        raise InputError(
            "This map reads the target's own layer 0: give token_ids, int64, one per position."
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise InputError(
            f"token_ids reach from {int(ids.min())} to {int(ids.max())}; the map knows 0 to "
            f"{known - 1}."
        )
