"""What a connector maps came over an exchange: packed, carried, checked, held, given back."""

from __future__ import annotations

import pytest
import torch
from exchange_cases import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    POISON,
    SOURCE,
    TOKEN_IDS,
    TOKENS_PER_BLOCK,
    Sending,
    make_pool,
    target,
)

from trtllm_kvmap.errors import InputError, MismatchError, UnavailableError
from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import Reason
from trtllm_kvmap.exchange.offer import make_offer
from trtllm_kvmap.exchange.receive import NotReceived, Received
from trtllm_kvmap.inject.connector.blocks import Offer
from trtllm_kvmap.inject.connector.export import Exported
from trtllm_kvmap.inject.connector.identity import HandoffIdentity
from trtllm_kvmap.inject.connector.received import ReceivedBlocks, pack_exported

COUNT = len(TOKEN_IDS)
NEEDED = -(-COUNT // TOKENS_PER_BLOCK)


def make_exported() -> Exported:
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(2, LAYERS, HEADS, COUNT, HEAD_DIM, generator=generator)
    return Exported(TOKEN_IDS, kv[0], kv[1])


def make_offered(handoff: str = "1") -> Offer:
    return Offer(HandoffIdentity("", "c", "t", "d", handoff), TOKEN_IDS, SOURCE)


def test_packed_blocks_hold_the_tokens_and_nothing_else() -> None:
    exported, pool = make_exported(), make_pool(9, POISON)
    before = pool.data.clone()
    ids = pack_exported(exported, pool)
    assert len(ids) == NEEDED
    for token in range(NEEDED * TOKENS_PER_BLOCK):
        block, offset = ids[token // TOKENS_PER_BLOCK], token % TOKENS_PER_BLOCK
        for field, numbers in enumerate((exported.keys, exported.values)):
            seen = pool.blocks[block, :, field, :, offset]
            wanted = numbers[:, :, token] if token < COUNT else torch.zeros(LAYERS, HEADS, HEAD_DIM)
            assert torch.equal(seen, wanted), (token, field)
    others = [block for block in range(9) if block not in ids]
    assert torch.equal(pool.data[others], before[others])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda e: Exported(e.token_ids, e.keys[:2], e.values[:2]), MismatchError),
        (lambda e: Exported(e.token_ids, e.keys.half(), e.values.half()), MismatchError),
        (lambda e: Exported(e.token_ids[:-1], e.keys, e.values), MismatchError),
        (None, UnavailableError),
    ],
)
def test_what_does_not_fit_holds_no_block(change, error: type[Exception]) -> None:
    pool = make_pool(9 if change else NEEDED - 1)
    exported = make_exported() if change is None else change(make_exported())
    before = pool.num_free
    with pytest.raises(error):
        pack_exported(exported, pool)
    assert pool.num_free == before


def test_from_one_engine_to_the_other_over_an_exchange() -> None:
    exported, transport = make_exported(), InProcessTransport()
    pool, landing = make_pool(11, POISON), make_pool(7, POISON)
    ids = pack_exported(exported, pool)
    offer = make_offer("r1", SOURCE, TOKEN_IDS, COUNT, pool, transport.expose(pool))
    blocks = ReceivedBlocks(landing)
    with target(landing, transport) as (listener, receive):
        sending = Sending(listener.address, offer, pool, ids)
        sending.start()
        received = receive()
        assert sending.ended().reason is Reason.COMPLETE
    assert isinstance(received, Received), received
    pool.data.fill_(POISON)
    salt = blocks.hold(make_offered(), received)
    assert salt == make_offered().identity.salt
    source = blocks.fetch(salt)
    assert (source.rope_length, len(source.slots)) == (COUNT, COUNT)
    for views, numbers in (
        (source.pool.keys, exported.keys),
        (source.pool.values, exported.values),
    ):
        for layer, view in enumerate(views):
            at = source.slots // TOKENS_PER_BLOCK, slice(None), source.slots % TOKENS_PER_BLOCK
            assert torch.equal(view[at].transpose(0, 1), numbers[layer])
    assert landing.num_free == 7 - NEEDED
    blocks.done(salt)
    blocks.done(salt)
    assert (landing.num_free, blocks.salts(), blocks.find(salt)) == (7, (), None)


def test_blocks_that_did_not_arrive_are_held_as_a_reason() -> None:
    blocks = ReceivedBlocks(make_pool(3))
    result = NotReceived(Reason.CORRUPTED, "block 2 of 5 has another checksum")
    salt = blocks.hold(make_offered(), result)
    assert blocks.find(salt) == make_offered()
    with pytest.raises(UnavailableError, match="corrupted: block 2 of 5"):
        blocks.fetch(salt)
    blocks.done(salt)
    assert blocks.salts() == ()


def test_an_awaited_hand_over_is_known_and_not_found() -> None:
    blocks, salt = ReceivedBlocks(make_pool(3)), make_offered().identity.salt
    blocks.await_offer(salt)
    assert (blocks.salts(), blocks.find(salt)) == ((salt,), None)
    blocks.hold(make_offered(), NotReceived(Reason.TIMEOUT, ""))
    assert blocks.salts() == (salt,)
    blocks.done(salt)
    assert blocks.salts() == ()


def test_blocks_of_an_offer_that_is_refused_are_given_back() -> None:
    landing = make_pool(7)
    blocks, transport = ReceivedBlocks(landing), InProcessTransport()
    offer = make_offer("r1", SOURCE, TOKEN_IDS, COUNT, landing, transport.expose(landing))
    ids = landing.take(NEEDED)
    longer = Offer(make_offered().identity, (*TOKEN_IDS, 1), SOURCE)
    with pytest.raises(InputError, match="19 tokens but has slots for 18"):
        blocks.hold(longer, Received(offer, ids))
    assert landing.num_free == 7


@pytest.mark.parametrize("arrived", [True, False])
def test_a_hand_over_that_is_held_is_not_touched_by_another_of_its_name(arrived: bool) -> None:
    landing, transport = make_pool(2 * NEEDED), InProcessTransport()
    blocks = ReceivedBlocks(landing)
    offer = make_offer("r1", SOURCE, TOKEN_IDS, COUNT, landing, transport.expose(landing))
    salt = blocks.hold(make_offered(), Received(offer, landing.take(NEEDED)))
    again = Received(offer, landing.take(NEEDED)) if arrived else NotReceived(Reason.TIMEOUT, "")
    with pytest.raises(InputError, match="held already"):
        blocks.hold(make_offered(), again)
    assert landing.num_free == NEEDED
    assert len(blocks.fetch(salt).slots) == COUNT
    blocks.done(salt)
    assert landing.num_free == 2 * NEEDED


def test_on_another_device_the_landing_blocks_are_free_at_once() -> None:
    landing, transport = make_pool(7), InProcessTransport()
    blocks = ReceivedBlocks(landing, "meta")
    offer = make_offer("r1", SOURCE, TOKEN_IDS, COUNT, landing, transport.expose(landing))
    salt = blocks.hold(make_offered(), Received(offer, landing.take(NEEDED)))
    assert landing.num_free == 7
    source = blocks.fetch(salt)
    assert source.slots.tolist() == list(range(COUNT))
    assert source.pool.device.type == "meta"
