"""The worker's half of a connector: source blocks in, target blocks out."""

from __future__ import annotations

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.connector.blocks import SourceBlocks, SourceKv
from trtllm_kvmap.inject.connector.orders import FailedLoad, LoadOrder
from trtllm_kvmap.mapper.backends import make_mapper
from trtllm_kvmap.mapper.contract import Span
from trtllm_kvmap.mapper.paging import Places
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import SKIP


class HandoffWorker:
    """Carries LoadOrders out, straight into the engine's pool, on the current stream."""

    def __init__(self, kvmap: KvMap, blocks: SourceBlocks, backend: str = "cpu") -> None:
        self._kvmap, self._blocks = kvmap, blocks
        self._mapper = make_mapper(kvmap, backend)

    def load_all(self, orders: tuple[LoadOrder, ...], target: KvPool) -> tuple[FailedLoad, ...]:
        """Carry every order out; one that fails spoils no other."""
        failures = []
        for order in orders:
            try:
                self.load(order, target)
            # Whatever went wrong, the target can compute the tokens itself.
            except Exception as error:
                reason = f"the load failed ({type(error).__name__}): {error}"
                failures.append(FailedLoad(order.request_id, order.block_ids, reason))
        return tuple(failures)

    def load(self, order: LoadOrder, target: KvPool) -> None:
        """Write the tokens of ``order`` into ``target``; nothing else of it changes.

        Raises InputError or MismatchError before anything is written when pool, order and source
        do not fit, and whatever ``SourceBlocks.fetch`` raises.
        """
        source = self._blocks.fetch(order.salt)
        if order.last > len(source.slots):
            raise InputError(
                f"The source's blocks hold {len(source.slots)} tokens; the order needs "
                f"{order.last}. Offer as many as were announced."
            )
        entries = self._own_entries(order, source)
        mapped = range(max(order.first, order.sink), order.last)
        self._mapper.map_kv(source.pool, target, self._span(order, source, mapped))
        for part, entry in entries:
            _place(entry, part, order, target)

    def _own_entries(self, order: LoadOrder, source: SourceKv) -> list[tuple[range, SinkEntry]]:
        """What is not mapped: (tokens, the target's own KV of the tokens from 0 to their end)."""
        wanted = (
            (range(order.first, order.spliced), source.exact, "the target's own KV"),
            (
                range(max(order.first, order.spliced), order.sink),
                self._kvmap.sink_for(order.token_ids),
                "the map's sink table",
            ),
        )
        entries = []
        for part, entry, what in wanted:
            part = range(part.start, min(part.stop, order.last))
            if not part:
                continue
            if entry is None or entry.token_ids[: part.stop] != order.token_ids[: part.stop]:
                raise InputError(
                    f"The order takes tokens {part.start} to {part.stop} from {what}, which has "
                    f"not all of them; plan again."
                )
            entries.append((part, entry))
        return entries

    def _span(self, order: LoadOrder, source: SourceKv, tokens: range) -> Span:
        first, count = tokens.start, len(tokens)
        stop = first + count
        positions = torch.arange(first, stop)
        return Span(
            source_slots=source.slots[first:stop].cpu(),
            target_slots=torch.from_numpy(order.table.slot_mapping(first, count)),
            positions=positions,
            token_ids=torch.tensor(order.token_ids[first:stop], dtype=torch.int64),
            source_length=source.rope_length,
            target_length=order.last,
        )


def _place(entry: SinkEntry, part: range, order: LoadOrder, target: KvPool) -> None:
    """Write the tokens of ``part`` of ``entry``; blocks of -1 are skipped."""
    slots = torch.from_numpy(order.table.slot_mapping(part.start, len(part)))
    kept = slots != SKIP
    if not bool(kept.any()):
        return
    places = Places.of(slots[kept], target.tokens_per_block, target.device)
    tokens = torch.arange(part.start, part.stop)[kept]
    for field, numbers in (("key", entry.keys), ("value", entry.values)):
        views, scale = target.field(field)  # type: ignore[arg-type]
        for layer, view in enumerate(views):
            rows = numbers[layer][:, tokens].transpose(0, 1).to(target.device, torch.float32)
            places.write(view, rows / scale)
