"""What a guard measures of a hand-over: its signals by formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from caches import stacked, tokens
from guard_cases import Models, bridge_of, pair_of
from handmade_maps import copy_map

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.signals import WINDOW, measure_signals
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.inject.hf_cache import HfCache, num_entries
from trtllm_kvmap.models import RemoteModel
from trtllm_kvmap.spec.plan import plan_handoff


def unturned(keys: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE taken off in complex numbers: channel pair z becomes z * exp(-i position frequency)."""
    half = keys.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    z = z * torch.exp(-1j * positions[:, None] * frequency)
    return torch.cat([z.real, z.imag], dim=-1)


@pytest.fixture
def pair(random_model: Callable) -> Models:
    return pair_of(random_model)


@pytest.fixture
def bridge(pair: Models) -> KvBridge:
    return bridge_of(pair)


@pytest.mark.parametrize(("count", "repair"), [(60, 16), (110, 90)])
@pytest.mark.parametrize("kept", [1, WINDOW])
def test_signals_are_those_of_the_formula(
    count: int, repair: int, kept: int, bridge: KvBridge
) -> None:
    source, target = bridge.source, bridge.target
    ids = tokens(count)
    read = prefill(source, ids)
    plan = plan_handoff(count, repair_window=repair)
    hand = bridge.hand_over(read.cache, ids, plan, keep_logits=kept)
    found = measure_signals(bridge, read.cache, ids, hand)

    first = count - min(repair, 64)
    alone = torch.log_softmax(read.logits.double(), -1)
    shared = prefill(target, ids[plan.repaired.start :], _before(bridge, read.cache, ids, plan))
    after = torch.log_softmax(shared.logits.double(), -1)
    gaps = [
        float(alone[i, ids[i + 1]] - after[i - plan.repaired.start, ids[i + 1]])
        for i in range(first, count - 1)
    ]
    assert found.loss_gap == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert found.loss_excess == pytest.approx(
        sum(max(gap, 0) for gap in gaps) / len(gaps), abs=1e-5
    )
    own = [-float(alone[i, ids[i + 1]]) for i in range(first, count - 1)]
    assert found.source_loss == pytest.approx(sum(own) / len(own), abs=1e-5)
    mapped = stacked(bridge.convert(read.cache, ids, first_tokens=0))[:, :, 0, :, first:].double()
    repaired = stacked(shared.cache)[:, :, 0, :, first:].double()
    positions = torch.arange(first, count)
    theta = target.spec.rope.theta
    mapped[0], repaired[0] = (unturned(keys[0], positions, theta) for keys in (mapped, repaired))
    error = (mapped - repaired).square().sum((2, 3, 4))
    spread = repaired.var(dim=3, correction=0).sum((2, 3)) * len(positions)
    ratio = error / spread  # [2, 6]: six layers in four bands are 2, 2, 1 and 1
    bands = [[0, 1], [2, 3], [4], [5]]
    expected = [math.sqrt(row[band].mean()) for row in ratio for band in bands]
    assert found.drift == pytest.approx(expected, rel=1e-4)


def _before(bridge: KvBridge, source_cache: HfCache, ids: torch.Tensor, plan: object) -> HfCache:
    """The target's cache of everything before the repair window, as the bridge fills it."""
    start = plan.repaired.start  # type: ignore[attr-defined]
    return bridge.convert(source_cache, ids[:start], first_tokens=1)


def test_the_source_cache_may_end_before_the_window(bridge: KvBridge) -> None:
    """A conversation whose last turn the source has not read."""
    ids, plan = tokens(60), plan_handoff(60, repair_window=20)
    whole, part = (prefill(bridge.source, ids[:n]).cache for n in (60, 40))
    signals = [
        measure_signals(bridge, cache, ids, bridge.hand_over(cache, ids, plan))
        for cache in (whole, part)
    ]
    np.testing.assert_allclose(*(s.to_features() for s in signals), atol=1e-4)
    assert (num_entries(whole), num_entries(part)) == (60, 40)


def test_a_source_in_another_process_sends_what_it_knows(bridge: KvBridge) -> None:
    ids, plan = tokens(60), plan_handoff(60, repair_window=20)
    read = prefill(bridge.source, ids)
    hand = bridge.hand_over(read.cache, ids, plan)
    here = measure_signals(bridge, read.cache, ids, hand)
    source = bridge.source
    afar = KvBridge(
        bridge.kvmap,
        source=RemoteModel(source.name, source.spec, source.fingerprint),
        target=bridge.target,
    )
    after = torch.log_softmax(read.logits.double(), -1)
    losses = torch.tensor([-float(after[i, ids[i + 1]]) for i in range(40, 59)])
    sent = measure_signals(afar, read.cache, ids, hand, losses)
    np.testing.assert_allclose(sent.to_features(), here.to_features(), atol=1e-4)


def test_a_perfect_map_shows_nothing(random_model: Callable) -> None:
    loaded = random_model()
    bridge = KvBridge(copy_map(loaded, loaded), source=loaded, target=loaded)
    ids = tokens(60)
    cache = prefill(loaded, ids).cache
    hand = bridge.hand_over(cache, ids, plan_handoff(60, repair_window=16))
    found = measure_signals(bridge, cache, ids, hand)
    assert abs(found.loss_gap) < 1e-5
    assert 0 <= found.loss_excess < 1e-5
    assert max(found.drift) < 1e-4


def test_what_cannot_be_measured_says_why(bridge: KvBridge) -> None:
    ids = tokens(2, 30)
    cache = prefill(bridge.source, ids).cache
    batch = bridge.hand_over(cache, ids, plan_handoff(30, repair_window=8))
    with pytest.raises(InputError, match=r"one prompt with at least 2 repaired.*\[2, 30\]"):
        measure_signals(bridge, cache, ids, batch)
    alone = prefill(bridge.source, ids[0]).cache
    last = bridge.hand_over(alone, ids[0], plan_handoff(30, repair_window=1))
    with pytest.raises(InputError, match="1 repaired; hand rows over one by one"):
        measure_signals(bridge, alone, ids[0], last)
    good = bridge.hand_over(alone, ids[0], plan_handoff(30, repair_window=8))
    afar = SimpleNamespace(source=SimpleNamespace(name="far"), target=bridge.target)
    with pytest.raises(UnavailableError, match="losses of far are not to be had here"):
        measure_signals(afar, alone, ids[0], good)  # type: ignore[arg-type]
    for losses, cache in ((6, alone), (7, prefill(bridge.source, ids[0, :29]).cache)):
        with pytest.raises(InputError, match=f"sent {losses} losses.*a guard needs 7 and 30"):
            measure_signals(bridge, cache, ids[0], good, torch.zeros(losses))
