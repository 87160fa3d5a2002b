"""Where a token lives in a paged pool: slots, block tables, and strides.

``slot = block_id * tokens_per_block + offset``; a slot of -1 is skipped. A pool is described per
layer and field by a view of shape [num_blocks, num_kv_heads, tokens_per_block, head_dim] with any
strides, so that one description covers TensorRT-LLM's HND blocks, a dense transformers cache (one
block per sequence) and anything else with a stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtllm_kvmap.errors import InputError

SKIP = -1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The geometry of one pool; strides are in elements, the channel stride is 1."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    tokens_per_block: int
    block_stride: int
    head_stride: int
    token_stride: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.tokens_per_block


def trtllm_layout(
    num_blocks: int, num_layers: int, num_kv_heads: int, tokens_per_block: int, head_dim: int
) -> KvLayout:
    """TensorRT-LLM's pool [num_blocks, num_layers, 2, num_kv_heads, tokens_per_block, head_dim],
    contiguous.
    """
    token_stride, head_stride = head_dim, tokens_per_block * head_dim
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        block_stride=num_layers * 2 * num_kv_heads * head_stride,
        head_stride=head_stride,
        token_stride=token_stride,
    )


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one sequence in order; token t lies in ``block_ids[t // tokens_per_block]``."""

    block_ids: tuple[int, ...]
    tokens_per_block: int

    def slot_mapping(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: the slots of tokens first .. first + count - 1; -1 where the block id is
        -1.
        """
        if first < 0 or count < 0 or first + count > len(self.block_ids) * self.tokens_per_block:
            raise InputError(
                f"Tokens {first} to {first + count} lie outside a table of {len(self.block_ids)} "
                f"blocks of "
                f"{self.tokens_per_block} tokens; give the blocks of the whole span."
            )
        tokens = np.arange(first, first + count, dtype=np.int64)
        blocks = np.asarray(self.block_ids, dtype=np.int64)[tokens // self.tokens_per_block]
        slots = blocks * self.tokens_per_block + tokens % self.tokens_per_block
        return np.where(blocks < 0, SKIP, slots)
