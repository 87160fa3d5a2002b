"""The steps of a hand-over, timed: which, and at which lengths. How long they take is no test's
business.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evaluate_cases import ITEMS, QUICK
from handmade_maps import random_map

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.latency import STAGES, measure_latency, ratios


def test_every_step_is_timed_at_every_length_that_both_models_hold(random_model: Callable) -> None:
    source = random_model("qwen3", seed=1)
    target = random_model("qwen3", seed=2, layers=3, max_positions=100)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    # 33 is S + N: nothing would be mapped. 99 leaves no room for two new tokens.
    found = measure_latency(bridge, source, ITEMS, QUICK, lengths=(33, 40, 98, 99), rounds=2)
    assert found["lengths"] == [40, 98]
    assert set(found["seconds"]) == {*STAGES, "target_prefill", "target_first_step"}
    assert set(found["turns"]) == set(found["seconds"])
    for name, seconds in found["seconds"].items():
        assert [len(each) for each in found["turns"][name]] == [2, 2]
        assert min(map(min, found["turns"][name])) > 0
        assert seconds == [sum(each) / 2 for each in found["turns"][name]]
    assert {key: found[key] for key in ("warm", "cold")} == ratios(found["turns"])
    assert all(c > w for c, w in zip(found["cold"], found["warm"], strict=True))
    assert (found["rounds"], found["threads"]) == (2, torch.get_num_threads())


def test_nothing_is_measured_where_no_length_fits(random_model: Callable) -> None:
    source, target = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    bridge = KvBridge(random_map(source, target), source=source, target=target)
    found = measure_latency(bridge, source, ITEMS, QUICK, lengths=(8,))
    assert (found["lengths"], found["seconds"], found["warm"]) == ([], {}, [])


def test_a_model_on_another_device_is_refused() -> None:
    elsewhere: Any = SimpleNamespace(name="large", device=torch.device("cuda", 0))
    bridge: Any = SimpleNamespace(source=elsewhere, target=elsewhere)
    with pytest.raises(InputError, match="timed on a CPU only"):
        measure_latency(bridge, elsewhere, ITEMS, QUICK)
