"""A FAKE of TensorRT-LLM's KV cache manager (version 1): one pool, block tables, and a reuse tree
that commits whatever a block holds under the tokens and the salt of the request that filled it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_kvmap.spec.model import ModelSpec

Key = tuple[object, tuple[int, ...]]  # the salt, all tokens to the end of the block


@dataclass
class _Sequence:
    salt: object
    block_ids: list[int] = field(default_factory=list)


class FakeKvCache:
    """``pool`` is what a connector is given: [num_blocks, num_layers, 2, num_kv_heads *
    tokens_per_block * head_dim], poisoned with NaN.

    ``partial_reuse`` copies the first tokens of a block that begins as the prompt goes on.
    ``blocks_by_chunk`` gives a request the blocks of a chunk when the chunk is scheduled, as later
    managers do.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        tokens_per_block: int,
        *,
        partial_reuse: bool = False,
        blocks_by_chunk: bool = False,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.partial_reuse, self.blocks_by_chunk = partial_reuse, blocks_by_chunk
        layers, heads, head_dim = spec.kv_shape
        self.pool = torch.full(
            (num_blocks, layers, 2, heads * tokens_per_block * head_dim), float("nan")
        )
        self.blocks = self.pool.view(num_blocks, layers, 2, heads, tokens_per_block, head_dim)
        self._free = list(range(num_blocks))
        self._users = dict.fromkeys(range(num_blocks), 0)
        self._tree: OrderedDict[Key, int] = OrderedDict()  # oldest first
        self._sequences: dict[int, _Sequence] = {}

    @property
    def num_available(self) -> int:
        """Blocks that are free or could be: cached, and nobody's."""
        return len(self._free) + sum(1 for block in self._tree.values() if not self._users[block])

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def add_sequence(self, request: Any, salt: object, num_tokens: int) -> int:
        """Give blocks for the first ``num_tokens`` tokens; returns how many hold KV already.

        At least one prompt token is always left to compute.
        """
        size, usable = self.tokens_per_block, request.prompt_len - 1
        sequence = self._sequences[request.request_id] = _Sequence(salt)
        reused = 0
        while reused + size <= usable:
            block = self._tree.get((salt, tuple(request.tokens[: reused + size])))
            if block is None:
                break
            self._tree.move_to_end((salt, tuple(request.tokens[: reused + size])))
            self._use(sequence, block)
            reused += size
        if self.partial_reuse:
            reused += self._copy_partial(sequence, request, salt, reused, usable)
        self.grow(request, num_tokens)
        return reused

    def grow(self, request: Any, num_tokens: int) -> None:
        sequence = self._sequences[request.request_id]
        while len(sequence.block_ids) < self.blocks_for(num_tokens):
            self._use(sequence, self._allocate())

    def get_cache_indices(self, request: Any) -> list[int]:
        return list(self._sequences[request.request_id].block_ids)

    def store_blocks(self, request: Any, num_tokens: int) -> None:
        """Commit the full blocks of the first ``num_tokens`` tokens, whatever is in them."""
        size = self.tokens_per_block
        sequence = self._sequences[request.request_id]
        for index in range(num_tokens // size):
            key = (sequence.salt, tuple(request.tokens[: (index + 1) * size]))
            self._tree.setdefault(key, sequence.block_ids[index])
            self._tree.move_to_end(key)

    def remove_sequence(self, request: Any) -> None:
        for block in self._sequences.pop(request.request_id).block_ids:
            self._users[block] -= 1
            if not self._users[block] and block not in self._tree.values():
                self._free.append(block)

    def forget(self) -> None:
        """Empty the tree."""
        for block in self._tree.values():
            if not self._users[block]:
                self._free.append(block)
        self._tree.clear()

    def _use(self, sequence: _Sequence, block: int) -> None:
        self._users[block] += 1
        sequence.block_ids.append(block)

    def _allocate(self) -> int:
        if not self._free:
            key = next(key for key, block in self._tree.items() if not self._users[block])
            self._free.append(self._tree.pop(key))
        block = self._free.pop()
        self.pool[block] = float("nan")
        return block

    def _copy_partial(
        self, sequence: _Sequence, request: Any, salt: object, reused: int, usable: int
    ) -> int:
        """How many tokens more a copied block holds."""
        wanted = request.tokens[reused : min(usable, reused + self.tokens_per_block)]
        best, length = None, 0
        for (other, tokens), block in self._tree.items():
            if other != salt or tokens[: -self.tokens_per_block] != tuple(request.tokens[:reused]):
                continue
            shared = 0
            while shared < len(wanted) and tokens[reused + shared] == wanted[shared]:
                shared += 1
            if shared > length:
                best, length = block, shared
        if best is not None:
            held = self.pool[best].clone()
            block = self._allocate()
            self._use(sequence, block)
            self.pool[block] = held
        return length
