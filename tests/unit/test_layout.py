"""Slots, and the strides of a TensorRT-LLM pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import BlockTable, trtllm_layout


@given(
    blocks=st.lists(st.integers(-1, 50), max_size=12),
    tokens_per_block=st.integers(1, 16),
    data=st.data(),
)
@settings(deadline=None, max_examples=200)
def test_slot_mapping_is_its_definition(
    blocks: list[int], tokens_per_block: int, data: st.DataObject
) -> None:
    room = len(blocks) * tokens_per_block
    first = data.draw(st.integers(0, room))
    count = data.draw(st.integers(0, room - first))
    slots = BlockTable(tuple(blocks), tokens_per_block).slot_mapping(first, count)
    wanted = []
    for token in range(first, first + count):
        block_id, offset = blocks[token // tokens_per_block], token % tokens_per_block
        wanted.append(-1 if block_id == -1 else block_id * tokens_per_block + offset)
    assert slots.dtype == np.int64
    assert slots.tolist() == wanted


@pytest.mark.parametrize(("first", "count"), [(0, 9), (8, 1), (-1, 1), (0, -1)])
def test_tokens_outside_the_table_are_refused(first: int, count: int) -> None:
    with pytest.raises(InputError, match="outside a table of 2 blocks of 4 tokens"):
        BlockTable((5, 3), 4).slot_mapping(first, count)


def test_a_trtllm_pool_has_the_strides_its_layout_says() -> None:
    memory = torch.arange(5 * 3 * 2 * 2 * 4 * 6, dtype=torch.float32)
    pool = KvPool.from_trtllm(memory.view(5, 3, 2, 2, 4, 6))
    layout = trtllm_layout(5, 3, 2, 4, 6)
    assert pool.kv_shape == (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (3, 2, 6)
    assert pool.num_slots == layout.num_slots == 20
    for view in (*pool.keys, *pool.values):
        assert view.stride() == (layout.block_stride, layout.head_stride, layout.token_stride, 1)
    # block 4, layer 2, value, head 1, offset 3, channel 5: the very last element.
    assert pool.values[2][4, 1, 3, 5] == memory[-1]
    assert pool.keys[1][2, 0, 1, 0] == memory[2 * layout.block_stride + 2 * 48 + 6]


def pool_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> KvPool:
    views = tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)
    return KvPool(views, views)


def test_pools_that_are_none_are_refused() -> None:
    view = torch.zeros(1, 2, 4, 6)
    with pytest.raises(MismatchError, match="at least one; got 0 and 0"):
        KvPool((), ())
    with pytest.raises(MismatchError, match="got 2 and 1"):
        KvPool((view, view), (view,))
    with pytest.raises(MismatchError, match=r"got \(1, 2, 4, 7\) beside \(1, 2, 4, 6\)"):
        pool_of((1, 2, 4, 6), (1, 2, 4, 7))
    with pytest.raises(MismatchError, match=r"got \(2, 4, 6\)"):
        pool_of((2, 4, 6))
    with pytest.raises(MismatchError, match=r"one dtype and device; got torch\.float16"):
        KvPool((view,), (view.half(),))
    with pytest.raises(MismatchError, match="float64 is not supported; use one of float32"):
        pool_of((1, 2, 4, 6), dtype=torch.float64)
    with pytest.raises(MismatchError, match=r"TensorRT-LLM pool has shape .* got \(5, 3, 2\)"):
        KvPool.from_trtllm(torch.zeros(5, 3, 2))
