"""The source's side of a connector: what a request has computed, copied out of the engine's pool.

The same serves a target that keeps the exact KV of its own turns, to be spliced later.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.inject.connector.blocks import SourceKv
from trtllm_kvmap.mapper.paging import Places
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import BlockTable


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """After this forward pass, copy the KV of ``token_ids`` out of the blocks of ``table`` and keep
    it under ``name``.
    """

    name: str
    token_ids: tuple[int, ...]
    table: BlockTable


@dataclass(slots=True)
class _Exporting:
    name: str
    token_ids: tuple[int, ...]
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0


class ExportScheduler:
    """Per request: begin, allocated and computed as the engine goes on, forget at its end. One
    order comes out when the whole prompt is computed, in however many chunks.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._exporting: dict[str, _Exporting] = {}

    def begin(self, request_id: str, name: str, token_ids: Sequence[int]) -> None:
        """Keep the KV of this prompt under ``name``; a preempted request begins again."""
        if request_id not in self._exporting:
            self._exporting[request_id] = _Exporting(name, tuple(int(t) for t in token_ids))
        self._exporting[request_id].block_ids.clear()

    def allocated(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The engine gave these blocks to the request, after those it gave before."""
        if request_id in self._exporting:
            self._exporting[request_id].block_ids.extend(block_ids)

    def computed(self, request_id: str, num_tokens: int) -> None:
        """So many tokens will have KV after the coming forward pass."""
        if request_id in self._exporting:
            self._exporting[request_id].computed = num_tokens

    def take_orders(self) -> tuple[ExportOrder, ...]:
        """The exports whose prompts are whole after the coming forward pass, each once."""
        ready = [
            request_id
            for request_id, e in self._exporting.items()
            if e.computed >= len(e.token_ids) <= len(e.block_ids) * self._tokens_per_block
        ]
        orders = []
        for request_id in ready:
            e = self._exporting.pop(request_id)
            table = BlockTable(tuple(e.block_ids), self._tokens_per_block)
            orders.append(ExportOrder(e.name, e.token_ids, table))
        return tuple(orders)

    def forget(self, request_id: str) -> None:
        """The request is over; if its prompt was never whole, nothing is kept."""
        self._exporting.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class Exported:
    """The KV of ``token_ids`` from position 0, in the order of the tokens: keys and values
    [num_layers, num_kv_heads, num_tokens, head_dim], in the pool's dtype, scaled to real numbers
    where the pool has scales.
    """

    token_ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor

    def as_source(self) -> SourceKv:
        """To be mapped: a pool of one block."""
        pool = KvPool(tuple(self.keys[:, None]), tuple(self.values[:, None]))
        count = len(self.token_ids)
        return SourceKv(pool, torch.arange(count), rope_length=count)

    def as_exact(self, num_tokens: int) -> SinkEntry:
        """To be spliced: the first ``num_tokens``, exact if this was the target's own engine and
        the request had nothing mapped.
        """
        return SinkEntry(self.token_ids, self.keys, self.values).first(num_tokens)


def read_out(pool: KvPool, order: ExportOrder) -> Exported:
    """Copy the tokens of ``order`` out of ``pool``. Raises InputError when a block of them is not
    there (-1).
    """
    count = len(order.token_ids)
    slots = torch.from_numpy(order.table.slot_mapping(0, count))
    if count == 0 or bool((slots < 0).any()):
        raise InputError(
            f"Of the {count} tokens of {order.name!r} some have no block; export a prompt whose "
            f"blocks are all in the pool."
        )
    places = Places.of(slots, pool.tokens_per_block, pool.device)
    layers, heads, head_dim = pool.kv_shape
    scaled = (pool.key_scale, pool.value_scale) != (1.0, 1.0)
    fields = []
    for views, scale in (pool.field("key"), pool.field("value")):
        shape, dtype = (layers, count, heads, head_dim), torch.float32 if scaled else pool.dtype
        rows = torch.empty(shape, dtype=dtype, device=pool.device)
        for layer, view in enumerate(views):
            places.read(view, rows[layer])
        fields.append((rows * scale if scaled else rows).transpose(1, 2))
    return Exported(order.token_ids, *fields)


class Exports:
    """What was exported in this process, by name, until it is taken. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, Exported] = {}
        self._lock = threading.Lock()

    def put(self, name: str, exported: Exported) -> None:
        with self._lock:
            self._kept[name] = exported

    def take(self, name: str) -> Exported:
        """Raises UnavailableError when nothing of that name was exported, or it was taken."""
        with self._lock:
            exported = self._kept.pop(name, None)
        if exported is None:
            raise UnavailableError(
                f"No export named {name!r} is held: its request did not end its prompt, or it was "
                f"taken already. Let the source read the prompt again."
            )
        return exported
