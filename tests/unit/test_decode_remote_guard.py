"""A map's guard where the source is another process: as in one process, and never passed by."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from handmade_maps import random_map
from remote_case import exchanged, pool_of

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import hand_over_guarded
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.remote import Ready, read_to_offer, take_over
from trtllm_kvmap.errors import InputError, NumericsError
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.messages import Recall
from trtllm_kvmap.exchange.receive import Received
from trtllm_kvmap.models import LoadedModel, RemoteModel, load_model
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder

FIRST, REPAIR = 4, 16
DRIFTS = 2 * 3  # keys and values of tiny-s's three layers
PLAIN = Guard((1.0, 0.5, 0.5, *[0.1] * DRIFTS), 0.25, 0.0, {})
RECALLING = replace(PLAIN, recalling=Guard((0.0, 0.0, 0.0, *[0.1] * DRIFTS, 5.0), 0.0, 0.0, {}))


@pytest.fixture(scope="module")
def reader() -> LoadedModel:
    """A trained model, and both of the pair: a random one knows nothing of what it has read."""
    return load_model(model_folder("tiny-s"))


@pytest.fixture(scope="module")
def prompt(reader: LoadedModel) -> list[int]:
    """A document that ends with facts of it said again, so that its end is known by its body."""
    config = TaskConfig(num_items=1, context_tokens=240, scored_tokens=60)
    (item,) = read_items(config, reader.tokenizer)
    return [*item.context, *item.continuation]


@pytest.fixture(scope="module")
def bridge(reader: LoadedModel) -> KvBridge:
    return KvBridge(random_map(reader, reader), source=reader, target=reader)


def afar(bridge: KvBridge, guard: Guard | dict | None) -> KvBridge:
    """``bridge`` of a target that knows its source by the map alone, which carries ``guard``."""
    entry = guard.to_json() if isinstance(guard, Guard) else guard
    kvmap = bridge.kvmap if entry is None else bridge.kvmap.with_guard(entry)
    remote = RemoteModel("far away", kvmap.source, kvmap.source_fingerprint)
    return KvBridge(kvmap, source=remote, target=bridge.target)


def pool_for(source: LoadedModel) -> BlockPool:
    return pool_of(source, 20, 16)


def limited(guard: Guard, limit: float) -> Guard:
    """``guard`` with another limit where it decides; where it does not, nothing would pass."""
    if guard.recalling is None:
        return replace(guard, limit=limit)
    return replace(guard, limit=-math.inf, recalling=replace(guard.recalling, limit=limit))


def received(
    source: LoadedModel, far: KvBridge, prompt: list[int], landing: BlockPool, **said: object
) -> Received:
    """``prompt`` read by the source and sent; ``said`` as for read_to_offer."""
    pool = pool_for(source)
    result = exchanged(source, far, pool, landing, offered=prompt, prompt=prompt, **said)
    assert isinstance(result, Received), result
    return result


def taken_over(far: KvBridge, prompt: list[int], result: Received, landing: BlockPool) -> Ready:
    ready = take_over(far, prompt, result, landing, first_tokens=FIRST, repair_window=REPAIR)
    assert landing.num_free == 20
    return ready


def assert_own(ready: Ready, target: LoadedModel, prompt: list[int]) -> None:
    """The target has read the whole prompt itself."""
    own = prefill(target, prompt, logits_to_keep=1).logits[-1]
    assert ready.status.state == "fallback_reprefill"
    assert ready.status.computed == len(prompt)
    torch.testing.assert_close(ready.logits, own, rtol=0, atol=1e-4)


@pytest.mark.parametrize("guard", [PLAIN, RECALLING], ids=["plain", "recalling"])
@pytest.mark.parametrize("repair", [REPAIR, 80], ids=lambda n: f"repair {n}")
def test_the_guard_decides_as_in_one_process(
    guard: Guard, repair: int, bridge: KvBridge, reader: LoadedModel, prompt: list[int]
) -> None:
    """The same score, so that it stands below one limit and not below another close by."""
    plan = plan_handoff(len(prompt), first_tokens=FIRST, repair_window=repair)
    cache = prefill(reader, prompt).cache
    here = hand_over_guarded(bridge, limited(guard, math.inf), cache, prompt, plan)
    assert here.score is not None
    if guard.recalling is not None:
        assert here.signals.recall > 0.05  # type: ignore[union-attr]
    for beside, state in ((1e-3, "applied"), (-1e-3, "fallback_reprefill")):
        far, landing = afar(bridge, limited(guard, here.score + beside)), pool_for(reader)
        recall = guard.recalling is not None
        result = received(reader, far, prompt, landing, guarded=plan, recall=recall)
        told = result.offer.recall
        assert (told is not None) == recall
        if told is not None:
            assert told.known
            assert told.asked or repair > REPAIR, "most of what is known is repaired then"
        ready = take_over(far, prompt, result, landing, first_tokens=FIRST, repair_window=repair)
        assert landing.num_free == 20
        assert ready.status.state == state
        if state == "applied":
            torch.testing.assert_close(ready.logits, here.handoff.logits, rtol=0, atol=1e-4)
            assert (ready.status.reason, ready.status.mapped) == ("", len(plan.mapped))
        else:
            assert_own(ready, reader, prompt)
            said = re.fullmatch(
                r"guard: it scores this hand-over (\S+), and (\S+) is its limit",
                ready.status.reason,
            )
            assert said is not None, ready.status.reason
            expected = pytest.approx([here.score, here.score - 1e-3], rel=0.01)
            assert [float(figure) for figure in said.groups()] == expected


def test_without_a_recall_the_guard_without_it_decides(
    bridge: KvBridge, reader: LoadedModel, prompt: list[int]
) -> None:
    plan = plan_handoff(len(prompt), first_tokens=FIRST, repair_window=REPAIR)
    for limit, state in ((math.inf, "applied"), (-math.inf, "fallback_reprefill")):
        far = afar(bridge, replace(limited(RECALLING, -limit), limit=limit))
        landing = pool_for(reader)
        result = received(reader, far, prompt, landing, guarded=plan)
        assert taken_over(far, prompt, result, landing).status.state == state


def test_a_guard_that_cannot_judge_lets_nothing_pass(
    bridge: KvBridge, reader: LoadedModel, prompt: list[int]
) -> None:
    plan = plan_handoff(len(prompt), first_tokens=FIRST, repair_window=REPAIR)
    open_ended = limited(PLAIN, math.inf)
    shorter = replace(plan, repaired=plan.repaired[1:])
    cases = (
        (open_ended, {}, "losses of far away are not to be had"),
        (open_ended, {"guarded": shorter}, f"sent {REPAIR - 2} losses"),
        ({"weights": "none"}, {"guarded": plan}, "guard in the map cannot be read"),
        (replace(open_ended, weights=(1.0,)), {"guarded": plan}, "weighs 1 signals"),
    )
    for guard, said, why in cases:
        far, landing = afar(bridge, guard), pool_for(reader)
        result = received(reader, far, prompt, landing, **said)
        ready = taken_over(far, prompt, result, landing)
        assert why in ready.status.reason
        assert_own(ready, reader, prompt)


@pytest.mark.parametrize("asked", [(3,), (200, 0)])
def test_a_recall_of_tokens_that_nothing_leads_up_to_is_not_weighed(
    asked: tuple[int, ...], bridge: KvBridge, reader: LoadedModel, prompt: list[int]
) -> None:
    """The protocol allows it; the prompt does not."""
    plan = plan_handoff(len(prompt), first_tokens=FIRST, repair_window=REPAIR)
    far, landing = afar(bridge, limited(RECALLING, math.inf)), pool_for(reader)
    result = received(reader, far, prompt, landing, guarded=plan, recall=True)
    strange = replace(result.offer, recall=Recall(asked, (0.1,) * len(asked), ()))
    ready = taken_over(far, prompt, replace(result, offer=strange), landing)
    assert "at positions from 4 to" in ready.status.reason
    assert_own(ready, reader, prompt)


def test_a_guard_set_on_other_hand_overs_is_said(
    bridge: KvBridge, reader: LoadedModel, prompt: list[int]
) -> None:
    plan = plan_handoff(len(prompt), first_tokens=FIRST, repair_window=REPAIR)
    same = {"S": FIRST, "N": REPAIR, "selected_tokens": 0}
    for measured in (same, {}, same | {"selected_tokens": 64}, same | {"N": 32}):
        for limit in (math.inf, -math.inf):
            guard = replace(limited(PLAIN, limit), measured=measured)
            far, landing = afar(bridge, guard), pool_for(reader)
            result = received(reader, far, prompt, landing, guarded=plan)
            said = taken_over(far, prompt, result, landing).unlike
            assert ("its rates do not hold here" in said) == (measured not in (same, {}))


def test_the_source_holds_no_block_for_what_cannot_be_judged(
    reader: LoadedModel, prompt: list[int]
) -> None:
    pool, transport = pool_for(reader), InProcessTransport()
    exposed, plan = transport.expose(pool), plan_handoff(len(prompt), repair_window=REPAIR)
    with pytest.raises(InputError, match=rf"{len(prompt)} tokens, and {len(prompt) - 1} are"):
        read_to_offer(reader, prompt[:-1], pool, exposed, "r1", guarded=plan)
    head = reader.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _m, _i, logits: logits * math.nan)
    try:
        with pytest.raises(NumericsError, match="NaN or infinity"):
            read_to_offer(reader, prompt, pool, exposed, "r1", guarded=plan)
    finally:
        hook.remove()
    assert pool.num_free == 20


def test_without_a_guard_nothing_is_said_for_one(
    bridge: KvBridge, reader: LoadedModel, prompt: list[int]
) -> None:
    far, landing = afar(bridge, None), pool_for(reader)
    result = received(reader, far, prompt, landing)
    assert (result.offer.losses, result.offer.recall) == ((), None)
    ready = taken_over(far, prompt, result, landing)
    assert (ready.status.state, ready.unlike) == ("applied", "")
