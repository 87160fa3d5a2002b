"""The worker's half: whole pools compared, poisoned first; and what is copied out of a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from handmade_maps import copy_map, own_layer_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.inject.connector.blocks import InProcessBlocks, Offer, SourceKv
from trtllm_kvmap.inject.connector.export import (
    Exported,
    ExportOrder,
    Exports,
    ExportScheduler,
    read_out,
)
from trtllm_kvmap.inject.connector.identity import HandoffIdentity
from trtllm_kvmap.inject.connector.orders import LoadOrder
from trtllm_kvmap.inject.connector.worker import HandoffWorker
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import BlockTable

SIZE, COUNT, POISON = 4, 19, -77.0
TOKENS = tuple(range(5, 5 + COUNT))
# Blocks of the target's request: out of order, one that is not there.
TABLE = BlockTable((6, -1, 0, 3, 2), SIZE)


@pytest.fixture(scope="module")
def kvmap(random_model: Callable) -> KvMap:
    """Copies every head; its sink table knows the first 7 tokens as 3.0."""
    source, target = random_model(seed=1), random_model(seed=0)
    layers, heads, head_dim = target.spec.kv_shape
    known = torch.full((layers, heads, 7, head_dim), 3.0)
    return copy_map(source, target, (SinkEntry(TOKENS[:7], known, known + 1),))


def packed_pool(kvmap: KvMap, blocks: int = 8) -> tuple[torch.Tensor, KvPool]:
    """One poisoned buffer, and views of it whose channels are not adjacent, as in vLLM's."""
    layers, heads, head_dim = kvmap.target.kv_shape
    buffer = torch.full((layers, 2, blocks, heads, head_dim, SIZE), POISON)
    views = buffer.transpose(-1, -2)
    return buffer, KvPool(tuple(views[:, 0]), tuple(views[:, 1]))


def source_kv(kvmap: KvMap, count: int = COUNT, exact: int = 0) -> SourceKv:
    """Numbers that tell every element apart, in slots in reverse; the target's own are 9.0."""
    layers, heads, head_dim = kvmap.source.kv_shape
    numbers = torch.arange(2 * layers * heads * count * head_dim, dtype=torch.float32)
    numbers = numbers.view(2, layers, 1, heads, count, head_dim)
    own = None
    if exact:
        nine = torch.full((layers, heads, exact, head_dim), 9.0)
        own = SinkEntry(TOKENS[:exact], nine, nine + 1)
    pool = KvPool(tuple(numbers[0]), tuple(numbers[1]))
    return SourceKv(pool, torch.arange(count - 1, -1, -1), rope_length=count, exact=own)


def offer(kvmap: KvMap, source: SourceKv, handoff: str = "1") -> tuple[InProcessBlocks, str]:
    blocks = InProcessBlocks()
    exact = len(source.exact.token_ids) if source.exact else 0
    who = HandoffIdentity("t", "c", "m", "digest", handoff)
    given = Offer(who, TOKENS[: len(source.slots)], kvmap.source_fingerprint, exact)
    return blocks, blocks.offer(given, source)


def order(salt: str, first: int, last: int, *, spliced: int = 0, sink: int = 0) -> LoadOrder:
    return LoadOrder("r", salt, first, last, spliced, max(spliced, sink), TOKENS[:last], TABLE)


@pytest.mark.parametrize(
    ("first", "last", "spliced", "sink"),
    [
        (0, 16, 0, 0),
        (0, 16, 0, 3),
        (0, 16, 5, 7),
        (0, 8, 6, 7),
        (0, 4, 2, 7),
        (4, 16, 2, 3),
        (4, 12, 5, 7),
        (4, 8, 0, 7),
        (8, 19, 0, 0),
        (12, 12, 0, 0),
    ],
)
def test_every_token_comes_from_its_own_place(
    first: int, last: int, spliced: int, sink: int, kvmap: KvMap
) -> None:
    source = source_kv(kvmap, exact=spliced)
    blocks, salt = offer(kvmap, source)
    buffer, pool = packed_pool(kvmap)
    expected = buffer.clone()
    for token in range(first, last):
        block = TABLE.block_ids[token // SIZE]
        for field, views in enumerate((source.pool.keys, source.pool.values)):
            numbers = torch.stack(views)[:, 0, :, COUNT - 1 - token]
            if token < spliced:
                numbers = torch.full_like(numbers, 9.0 + field)
            elif token < sink:
                numbers = torch.full_like(numbers, 3.0 + field)
            if block >= 0:
                expected[:, field, block, :, :, token % SIZE] = numbers
    HandoffWorker(kvmap, blocks).load(order(salt, first, last, spliced=spliced, sink=sink), pool)
    assert torch.equal(buffer, expected)


def test_a_sink_longer_than_a_block_comes_in_two_orders(kvmap: KvMap) -> None:
    blocks, salt = offer(kvmap, source_kv(kvmap))
    _, pool = packed_pool(kvmap)
    table = BlockTable((6, 1), SIZE)
    worker = HandoffWorker(kvmap, blocks)
    for first, last in ((0, 4), (4, 8)):
        worker.load(replace(order(salt, first, last, sink=7), table=table), pool)
    seen = torch.cat([pool.keys[1][6], pool.keys[1][1]], dim=1)
    assert (seen[:, :7] == 3.0).all()
    assert not (seen[:, 7] == 3.0).any()
    assert not (seen[:, 7] == POISON).any()


def test_an_order_names_the_blocks_it_writes() -> None:
    assert order("s", 4, 13).block_ids == (0, 3)
    assert order("s", 0, 4).block_ids == (6,)
    assert order("s", 8, 8).block_ids == ()


def test_token_ids_reach_a_map_that_reads_them(random_model: Callable) -> None:
    """Values of layer 0 are the token table's rows, from the middle of a prompt on."""
    source, target = random_model(seed=1), random_model(seed=0)
    kvmap = own_layer_map(source, target)
    blocks, salt = offer(kvmap, source_kv(kvmap))
    _, pool = packed_pool(kvmap)
    HandoffWorker(kvmap, blocks).load(order(salt, 8, 16), pool)
    rows = kvmap.token_table.values[list(TOKENS[8:12])]
    seen = pool.values[0][TABLE.block_ids[2]].transpose(0, 1)
    torch.testing.assert_close(seen, rows, rtol=0, atol=1e-6)


def test_the_targets_own_kv_is_scaled_as_the_pool_is(kvmap: KvMap) -> None:
    blocks, salt = offer(kvmap, source_kv(kvmap, exact=2))
    _, pool = packed_pool(kvmap)
    pool = replace(pool, key_scale=2.0, value_scale=4.0)
    HandoffWorker(kvmap, blocks).load(order(salt, 0, 4, spliced=2), pool)
    assert (pool.keys[0][6, :, :2] == 4.5).all()
    assert (pool.values[0][6, :, :2] == 2.5).all()


def test_a_load_that_fails_spoils_no_other(kvmap: KvMap) -> None:
    blocks, salt = offer(kvmap, source_kv(kvmap))
    buffer, pool = packed_pool(kvmap)
    bad = (
        (order("unknown", 0, 8), "not held any more"),
        (order(salt, 0, 8, spliced=2), "the target's own KV"),
        (order(salt, 0, 16, sink=9), "the map's sink table"),
        (replace(order(salt, 16, 20), token_ids=(*TOKENS, 1)), "hold 19 tokens"),
        (replace(order(salt, 0, 4), table=BlockTable((99,), SIZE)), "target_slots"),
    )
    worker = HandoffWorker(kvmap, blocks)
    failures = worker.load_all(tuple(wrong for wrong, _ in bad), pool)
    assert bool((buffer == POISON).all()), "a load that failed has written"
    for (wrong, words), failure in zip(bad, failures, strict=True):
        assert words in failure.reason
        assert failure.block_ids == wrong.block_ids
    fine = order(salt, 8, 12)
    (failure,) = worker.load_all((bad[0][0], fine), pool)
    assert failure.request_id == "r"
    assert not (pool.keys[0][0] == POISON).any(), "the other order was not carried out"


def test_an_offer_must_fit_its_blocks(kvmap: KvMap) -> None:
    source = source_kv(kvmap, exact=3)
    blocks, salt = offer(kvmap, source)
    who = HandoffIdentity("t", "c", "m", "digest", "1")
    for given, words in (
        (Offer(who, TOKENS, kvmap.source_fingerprint, 3), "held already"),
        (Offer(who, (*TOKENS, 1), kvmap.source_fingerprint, 3), "19"),
        (Offer(who, TOKENS, kvmap.source_fingerprint, 2), "2 exact tokens"),
        (Offer(who, (1, *TOKENS[1:]), kvmap.source_fingerprint, 3), "first tokens of the offer"),
    ):
        with pytest.raises(InputError, match=words):
            blocks.offer(given, source)
    assert blocks.salts() == (salt,)
    blocks.done(salt)
    blocks.done(salt)
    assert blocks.find(salt) is None
    with pytest.raises(UnavailableError, match="not held any more"):
        blocks.fetch(salt)


# --- Export --------------------------------------------------------------------------------------


def test_an_export_waits_for_the_whole_prompt() -> None:
    exports = ExportScheduler(SIZE)
    exports.begin("r", "name", TOKENS[:10])
    exports.allocated("r", [4])
    exports.computed("r", 4)
    assert exports.take_orders() == ()
    exports.allocated("r", [7, 1])
    exports.computed("r", 9)
    assert exports.take_orders() == ()
    exports.begin("r", "name", TOKENS[:10])  # preempted: other blocks
    exports.allocated("r", [2, 3, 5])
    exports.computed("r", 10)
    assert exports.take_orders() == (ExportOrder("name", TOKENS[:10], BlockTable((2, 3, 5), SIZE)),)
    assert exports.take_orders() == ()
    exports.begin("s", "other", TOKENS[:4])
    exports.forget("s")
    exports.allocated("s", [1])
    exports.computed("s", 4)
    assert exports.take_orders() == ()


def test_what_is_copied_out_is_what_lies_in_the_blocks(kvmap: KvMap) -> None:
    buffer, pool = packed_pool(kvmap)
    buffer.copy_(torch.arange(buffer.numel()).view_as(buffer))
    table = BlockTable((6, 1, 0), SIZE)
    exported = read_out(pool, ExportOrder("name", TOKENS[:10], table))
    for token in range(10):
        there = buffer[:, :, table.block_ids[token // SIZE], :, :, token % SIZE]
        assert torch.equal(exported.keys[:, :, token], there[:, 0])
        assert torch.equal(exported.values[:, :, token], there[:, 1])
    kept = exported.keys.clone()
    buffer.zero_()
    assert torch.equal(exported.keys, kept), "the engine's next request would change it"
    scaled = replace(pool, key_scale=2.0, value_scale=4.0)
    buffer.fill_(1.5)
    again = read_out(scaled, ExportOrder("name", TOKENS[:10], table))
    assert (float(again.keys.max()), float(again.values.min())) == (3.0, 6.0)
    for bad in (ExportOrder("n", TOKENS[:10], TABLE), ExportOrder("n", (), table)):
        with pytest.raises(InputError, match="have no block"):
            read_out(pool, bad)


def test_an_export_is_taken_once_as_source_or_as_exact(kvmap: KvMap) -> None:
    source = source_kv(kvmap, 8)
    keys, values = (torch.stack(v)[:, 0] for v in (source.pool.keys, source.pool.values))
    exports = Exports()
    exports.put("name", Exported(TOKENS[:8], keys, values))
    exported = exports.take("name")
    with pytest.raises(UnavailableError, match="'name'"):
        exports.take("name")
    again = exported.as_source()
    assert torch.equal(again.pool.keys[1][0], keys[1])
    assert again.slots.tolist() == list(range(8))
    exact = exported.as_exact(3)
    assert exact.token_ids == TOKENS[:3]
    assert torch.equal(exact.values, values[:, :, :3])
