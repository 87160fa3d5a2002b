"""Hand-overs whose source is another process: what exchange/ carries, in a connector's terms.

The source packs what its engine exported into blocks that travel; the target holds the blocks that
arrived until the request that maps them is over.
"""

from __future__ import annotations

import threading

import torch

from trtllm_kvmap.errors import MismatchError, UnavailableError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.receive import NotReceived, Received
from trtllm_kvmap.inject.connector.blocks import InProcessBlocks, Offer, SourceKv
from trtllm_kvmap.inject.connector.export import Exported
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import BlockTable


def pack_exported(exported: Exported, pool: BlockPool) -> tuple[int, ...]:
    """Copy what an engine exported into free blocks of ``pool``; what send_blocks needs.

    Behind the last token its block is zero: no other conversation's numbers travel along. Raises
    UnavailableError when there are too few free blocks and MismatchError for another geometry or
    dtype; then no block is held.
    """
    at, count = pool.layout, len(exported.token_ids)
    needed = (at.num_layers, at.num_kv_heads, count, at.head_dim)
    dtype = str(exported.keys.dtype).removeprefix("torch.")
    if tuple(exported.keys.shape) != needed or dtype != pool.dtype:
        raise MismatchError(
            f"The export holds {tuple(exported.keys.shape)} in {dtype}; the pool's blocks take "
            f"{needed} in {pool.dtype}. Make the pool for the source's model."
        )
    size = at.tokens_per_block
    block_ids = pool.take(-(-count // size))
    blocks, room = pool.blocks, len(block_ids) * size
    for field, numbers in enumerate((exported.keys, exported.values)):
        rows = numbers.new_zeros(*needed[:2], room, at.head_dim)
        rows[:, :, :count] = numbers
        parts = rows.view(*needed[:2], len(block_ids), size, at.head_dim).movedim(2, 0)
        blocks[list(block_ids), :, field] = parts.to(blocks.device)
    return block_ids


class ReceivedBlocks(InProcessBlocks):
    """SourceBlocks over a ``landing`` pool of exchange/. Thread-safe.

    Where the engine's pool lies on a GPU, give its ``device``: the blocks are copied there, and the
    landing ones are free at once.
    """

    def __init__(self, landing: BlockPool, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._landing, self._device = landing, torch.device(device)
        self._awaited: set[str] = set()
        self._lost: dict[str, str] = {}
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._guard = threading.Lock()

    def await_offer(self, salt: str) -> None:
        """Blocks for this salt may come: until hold() or done() a request that carries it is told
        that they are not here.
        """
        with self._guard:
            self._awaited.add(salt)

    def hold(self, offer: Offer, result: Received | NotReceived) -> str:
        """Hold what receive_blocks returned for ``offer``, whose tokens are those that arrived;
        returns the salt to send the target's request with. Blocks that did not arrive are held as a
        reason: the request is computed, and its status says why.
        """
        if isinstance(result, NotReceived):
            nothing = (torch.zeros(1, 1, 1, 1),)
            slots = torch.zeros(len(offer.token_ids), dtype=torch.int64)
            salt = self.offer(offer, SourceKv(KvPool(nothing, nothing), slots, 0))
            with self._guard:
                self._lost[salt] = f"{result.reason.value}: {result.detail}"
            return salt
        try:
            salt = self.offer(offer, self._source_of(result))
        except Exception:
            self._landing.give_back(result.block_ids)
            raise
        if self._device.type == "cpu":
            with self._guard:
                self._blocks[salt] = result.block_ids
        else:
            self._landing.give_back(result.block_ids)
        return salt

    def fetch(self, salt: str) -> SourceKv:
        with self._guard:
            reason = self._lost.get(salt)
        if reason is not None:
            raise UnavailableError(f"The source's blocks did not arrive ({reason}).")
        return super().fetch(salt)

    def done(self, salt: str) -> None:
        super().done(salt)
        with self._guard:
            self._awaited.discard(salt)
            self._lost.pop(salt, None)
            ids = self._blocks.pop(salt, None)
        if ids is not None:
            self._landing.give_back(ids)

    def salts(self) -> tuple[str, ...]:
        with self._guard:
            awaited = tuple(self._awaited)
        return tuple(dict.fromkeys((*super().salts(), *awaited)))

    def _source_of(self, result: Received) -> SourceKv:
        offer, ids = result.offer, result.block_ids
        blocks = self._landing.blocks
        if self._device.type != "cpu":
            blocks = blocks[list(ids)].to(self._device)  # returns when it is there
            ids = tuple(range(len(ids)))
        slots = BlockTable(ids, offer.layout.tokens_per_block).slot_mapping(0, offer.num_tokens)
        return SourceKv(
            KvPool.from_trtllm(blocks, offer.key_scale, offer.value_scale),
            torch.from_numpy(slots),
            rope_length=offer.rope_length,
        )
