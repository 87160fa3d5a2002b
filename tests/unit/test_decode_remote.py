"""A hand-over whose source's blocks came from elsewhere: as one in a single process, or the
target's own reading.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from handmade_maps import random_map
from remote_case import exchanged, pool_of

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.remote import read_to_offer, take_over
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import Reason
from trtllm_kvmap.exchange.receive import NotReceived, Received
from trtllm_kvmap.models import LoadedModel, RemoteModel
from trtllm_kvmap.spec.plan import plan_handoff

PROMPT = list(range(3, 43))  # 40 tokens
REPAIR = 8


@pytest.fixture(scope="module")
def source(random_model: Callable[..., LoadedModel]) -> LoadedModel:
    return random_model("qwen3", layers=3, kv_heads=2, seed=1)


@pytest.fixture(scope="module")
def bridge(random_model: Callable[..., LoadedModel], source: LoadedModel) -> KvBridge:
    """Of a target that knows its source by the map alone."""
    target = random_model("qwen3", layers=2, kv_heads=4, seed=2)
    kvmap = random_map(source, target)
    remote = RemoteModel("far away", kvmap.source, kvmap.source_fingerprint)
    return KvBridge(kvmap, source=remote, target=target)


def sent(
    source: LoadedModel, bridge: KvBridge, landing: BlockPool, offered: list[int]
) -> Received | NotReceived:
    """``offered`` read by the source and sent to a target that has PROMPT to answer."""
    pool = pool_of(source, 12, 4)
    return exchanged(source, bridge, pool, landing, offered=offered, prompt=PROMPT)


@pytest.mark.parametrize("offered", [32, 40, 21], ids=lambda n: f"{n} offered")
def test_the_answer_is_that_of_one_process(
    source: LoadedModel, bridge: KvBridge, offered: int
) -> None:
    landing = pool_of(source, 11, 4)
    result = sent(source, bridge, landing, PROMPT[:offered])
    ready = take_over(bridge, PROMPT, result, landing, repair_window=REPAIR)
    plan = plan_handoff(len(PROMPT), repair_window=max(REPAIR, 40 - offered))
    wanted = bridge.hand_over(prefill(source, PROMPT).cache, PROMPT, plan)
    assert ready.status.state == "applied"
    assert ready.status.mapped == len(plan.mapped)
    assert torch.allclose(ready.logits, wanted.logits, rtol=0, atol=1e-5)
    own = prefill(bridge.target, PROMPT).logits[-1]
    assert not torch.allclose(ready.logits, own, atol=0.01), "the map changed nothing"
    assert landing.num_free == 11


def test_nothing_received_is_read_by_the_target(bridge: KvBridge, source: LoadedModel) -> None:
    landing = pool_of(source, 11, 4)
    result = NotReceived(Reason.PEER_LOST, "closed")
    ready = take_over(bridge, PROMPT, result, landing)
    own = prefill(bridge.target, PROMPT, logits_to_keep=1)
    assert torch.equal(ready.logits, own.logits[-1])
    assert (ready.status.state, ready.status.reason) == ("fallback_reprefill", "peer_lost: closed")
    assert ready.status.computed == len(PROMPT)


def test_blocks_that_cannot_be_used_are_not(bridge: KvBridge, source: LoadedModel) -> None:
    """Checksums fit, and still: not-a-number in a block."""
    landing = pool_of(source, 11, 4)
    result = sent(source, bridge, landing, PROMPT)
    assert isinstance(result, Received)
    landing.blocks[result.block_ids[2]] = torch.nan
    ready = take_over(bridge, PROMPT, result, landing, repair_window=REPAIR)
    own = prefill(bridge.target, PROMPT, logits_to_keep=1)
    assert torch.equal(ready.logits, own.logits[-1])
    assert ready.status.state == "fallback_reprefill"
    assert "NaN" in ready.status.reason
    assert landing.num_free == 11


def test_another_model_s_offer_is_refused(
    source: LoadedModel, bridge: KvBridge, random_model: Callable[..., LoadedModel]
) -> None:
    landing = pool_of(source, 11, 4)
    other = random_model("qwen3", layers=3, kv_heads=2, seed=7)
    result = sent(other, bridge, landing, PROMPT)
    assert isinstance(result, NotReceived)
    assert result.reason is Reason.WRONG_MODEL


def test_a_source_without_room_offers_nothing(source: LoadedModel) -> None:
    pool, transport = pool_of(source, 9, 4), InProcessTransport()
    exposed = transport.expose(pool)
    with pytest.raises(UnavailableError, match="10 blocks are needed and 9 of 9"):
        read_to_offer(source, PROMPT, pool, exposed, "r1")
    with pytest.raises(InputError):
        read_to_offer(source, [10**6], pool, exposed, "r1")
    assert pool.num_free == 9


def test_a_prompt_too_long_for_the_target_is_the_caller_s_mistake(
    bridge: KvBridge, source: LoadedModel
) -> None:
    long = [5] * (bridge.target.spec.max_positions + 1)
    with pytest.raises(InputError):
        take_over(bridge, long, NotReceived(Reason.TIMEOUT, ""), pool_of(source, 1, 4))
