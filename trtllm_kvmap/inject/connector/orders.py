"""What the scheduler's half tells the worker's: plain data that any engine can pickle."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.spec.layout import BlockTable


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill the target's KV of tokens ``first`` .. ``last`` - 1 of one request before the next
    forward pass.

    Tokens below ``spliced`` are the target's own exact KV that came with the offer; from there to
    ``sink`` they are in the map's sink table; the rest is mapped. ``token_ids`` are tokens 0 ..
    ``last`` - 1; ``table`` has the request's blocks from token 0 on, with -1 for a block that is
    not here and is skipped.
    """

    request_id: str
    salt: str
    first: int
    last: int
    spliced: int
    sink: int
    token_ids: tuple[int, ...]
    table: BlockTable

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks that this order writes."""
        size = self.table.tokens_per_block
        ids = self.table.block_ids[self.first // size : -(-self.last // size)]
        return tuple(block for block in ids if block >= 0)


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """An order that could not be carried out: none of its blocks may be read before the target has
    computed their tokens.
    """

    request_id: str
    block_ids: tuple[int, ...]
    reason: str
