"""Routing: each choice for its own reason, break-even lengths held to a search by hand, and the
device-seconds of a request.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evidence_case import DIGEST

from trtllm_kvmap.artifact.evidence import CONTROLS
from trtllm_kvmap.decode.routing.routing import Route, Situation, route
from trtllm_kvmap.decode.routing.speeds import Speeds, Timing, bytes_per_token
from trtllm_kvmap.decode.routing.vouched import RoutingPolicy
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.accounting import Compute, Phases, compute_of, saving
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams

# The target reads 1,000 tokens a second; mapping takes a tenth of that and sending another tenth;
# a repair takes 0.1 s at any length. By hand: n/1000 > 0.1 + 2 (n - 32)/10000  <=>  n > 117, a tie.
SPEEDS = Speeds(
    source_prefill=Timing(((1000, 0.25),)),
    target_prefill=Timing(((1000, 1.0),)),
    map=Timing(((1000, 0.1),)),
    repair=Timing(((1, 0.1), (1000, 0.1))),
    repair_window=32,
    source_decode=100.0,
    target_decode=25.0,
    transfer_bytes_per_second=1e6,
)
BYTES = 100
DOWN = replace(SPEEDS, source_decode=25.0, target_decode=100.0)


def figure(value: float, half: float) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def evidence(**changed: Any) -> dict[str, Any]:
    arms = {
        name: {"accuracy": figure(value, 0.02), "nll": figure(2 - value, 0.02)}
        for name, value in (("source", 0.6), ("target", 0.9))
    }
    found = {
        "config": {
            "metric": "accuracy",
            "N": 32,
            "S": 1,
            "context_tokens": {"longest": 1000},
            "map_digest": DIGEST,
        },
        "arms": arms,
        "gap_recovered": figure(0.8, 0.1),
        "perplexity_ratio": figure(1.1, 0.05),
        "controls": dict.fromkeys(CONTROLS, "passed"),
    }
    return found | changed


def go(situation: Situation, known: Any, speeds: Speeds = SPEEDS, **options: Any) -> Route:
    policy = options.pop("policy", None)
    sizes = {"bytes_per_token": BYTES, "max_positions": 8192}
    return route(situation, speeds, known, DIGEST, policy=policy, **sizes)


def test_a_proven_map_that_is_sooner_is_taken_and_costs_what_its_phases_cost() -> None:
    found = go(Situation(1000, reply_tokens=51), evidence())
    assert (found.choice, found.direction, found.objection) == ("map", "up", "")
    assert found.first_token["map"] == pytest.approx(0.1 + 968 * 0.0001 + 968 * 1e-4)
    assert found.first_token["reprefill"] == pytest.approx(1.0)
    assert found.whole_reply["reprefill"] == pytest.approx(1.0 + 50 / 25)
    assert found.whole_reply["stay"] == pytest.approx(51 / 100)
    assert found.break_even_reply is None  # the source ends every reply sooner
    assert "1 s by reading again" in found.reason


def test_below_the_break_even_length_the_target_reads_and_above_it_the_map_is_taken() -> None:
    even = go(Situation(50), evidence()).break_even_tokens
    assert even == 118
    assert go(Situation(116), evidence()).choice == "reprefill"
    assert go(Situation(118), evidence()).choice == "map"


def test_the_break_even_is_behind_the_last_length_at_which_the_map_is_slower() -> None:
    # Sooner at short lengths, slower from 200 to 400, sooner again behind.
    bumpy = replace(
        SPEEDS, map=Timing(((100, 0.0), (200, 0.5), (300, 0.5), (301, 0.0), (302, 0.0)))
    )
    found = go(Situation(50), evidence(), bumpy).break_even_tokens
    assert found is not None
    lengths = np.arange(33, 8193)
    mapped = 0.1 + bumpy.map.seconds(lengths - 32) + (lengths - 32) * BYTES / 1e6
    assert found == lengths[np.flatnonzero(mapped >= lengths / 1000)[-1] + 1]
    assert found > 300


def test_a_map_that_never_catches_up_has_no_break_even() -> None:
    slow = replace(SPEEDS, map=Timing(((1000, 2.0),)))
    found = go(Situation(1000), evidence(), slow)
    assert (found.choice, found.break_even_tokens) == ("reprefill", None)


def test_what_is_mirrored_costs_the_repair_alone() -> None:
    found = go(Situation(1000, mirrored=True), evidence())
    assert found.first_token["map"] == pytest.approx(0.1)
    assert found.break_even_tokens == 101


@pytest.mark.parametrize(("holds", "even"), [(None, 118), (0, 156), (60, 129), (100, 118)])
def test_what_the_source_has_yet_to_read_costs_its_reading(holds: int | None, even: int) -> None:
    """The source reads 4,000 tokens a second, and no further than is mapped. From nothing:
    n/1000 > 0.1 + (n - 32)(1/5000 + 1/4000)  <=>  n > 155.6; behind 60 tokens:  n > 128.4.
    """
    found = go(Situation(1000, source_holds=holds), evidence())
    assert found.break_even_tokens == even
    unread = 0 if holds is None else 968 - holds
    assert found.first_token["map"] == pytest.approx(0.1 + 968 * 2e-4 + unread / 4000)
    stays = 0 if holds is None else (1000 - holds) / 4000
    assert found.first_token["stay"] == pytest.approx(1 / 100 + stays)
    below = Situation(even - 2, source_holds=holds)  # even - 1 may be a tie
    assert go(below, evidence()).choice == "reprefill"
    assert go(Situation(even, source_holds=holds), evidence()).choice == "map"


@pytest.mark.parametrize(
    ("points", "seconds"),
    [(((100, 0.01), (200, 0.05)), 0.04), (((100, 0.05), (200, 0.06)), 0.05)],
)
def test_reading_behind_a_held_part_costs_the_longer_way_and_a_beginning(
    points: Any, seconds: float
) -> None:
    known = replace(SPEEDS, source_prefill=Timing(points))
    read, unread = (
        go(Situation(232, source_holds=holds), evidence(), known).first_token["map"]
        for holds in (None, 100)
    )
    assert unread - read == pytest.approx(seconds)
    whole = go(Situation(232, source_holds=232), evidence(), known)
    assert whole.first_token["map"] == read


def test_where_only_the_target_answers_it_reads_what_the_map_may_not() -> None:
    arms = evidence()["arms"]
    upside_down = evidence(arms={"source": arms["target"], "target": arms["source"]})
    for known, policy in ((upside_down, None), (evidence(), RoutingPolicy(max_seconds=0.001))):
        assert go(Situation(1000), known, policy=policy).choice == "stay"
        alone = Situation(1000, direction="up", may_stay=False)
        assert go(alone, known, policy=policy).choice == "map"
    assert go(Situation(1000, direction="up", may_stay=False), None).choice == "reprefill"
    with pytest.raises(InputError, match="source_holds"):
        Situation(10, source_holds=-1)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (None, "no evidence"),
        ({"held_out": "none"}, "names no controls"),
        (evidence(controls={}), "reinjection, rope_round_trip"),
        (
            evidence(config={"map_digest": DIGEST}),
            "no report that can be judged by (KeyError('metric'))",
        ),
        (evidence(gap_recovered=0.9), "no gap recovered with an interval"),
        (evidence(gap_recovered=dict.fromkeys(("value", "low", "high"))), "do not say why"),
        (evidence(config=evidence()["config"] | {"N": "32"}), "'32' is no number"),
        (evidence(gap_recovered=figure(0.8, math.nan)), "gap recovered that is no number"),
        (evidence(perplexity_ratio=dict.fromkeys(("value", "low", "high"), 10**400)), "no number"),
        (evidence(perplexity_ratio=figure(1.1, math.nan)), "nan is no number"),
        (evidence(gap_recovered=figure(0.05, 0.1)), "gap recovered (0.05, -0.05 to 0.15)"),
        (evidence(gap_recovered={"value": 0.9, "low": None, "high": None}), "no interval"),
        (evidence(perplexity_ratio=figure(1.2, 0.1)), "perplexity below 1.25"),
        (evidence(config=evidence()["config"] | {"N": 64}), "repairs 64 tokens, this host 32"),
        (evidence(config=evidence()["config"] | {"map_digest": "0f" * 32}), "is of another map"),
        (
            evidence(config=evidence()["config"] | {"context_tokens": {"longest": 200}}),
            "saw at most 200 tokens",
        ),
    ],
)
def test_a_map_that_is_not_vouched_for_is_not_taken(known: Any, said: str) -> None:
    found = go(Situation(1000), known)
    assert found.choice == "reprefill"
    assert said in found.objection
    assert said in found.reason


def test_upward_staying_needs_a_reason() -> None:
    found = go(Situation(1000), evidence(), policy=RoutingPolicy(max_seconds=0.2))
    assert found.choice == "stay"
    assert "at most 0.2 s" in found.reason
    arms = evidence()["arms"]
    upside_down = {"source": arms["target"], "target": arms["source"]}
    assert go(Situation(1000), evidence(arms=upside_down)).choice == "stay"


def test_downward_the_earlier_end_of_the_reply_decides() -> None:
    arms = evidence()["arms"]
    worse = {"source": arms["target"], "target": arms["source"]}
    known = evidence(gap_recovered=dict.fromkeys(("value", "low", "high")), arms=worse)
    short, long = go(Situation(1000, 5), known, DOWN), go(Situation(1000, 100), known, DOWN)
    assert (short.direction, short.choice, long.choice) == ("down", "stay", "map")
    even = long.break_even_reply
    # 0.2936 + (r - 1)/100 < r/25  <=>  r > 9.45
    assert even == 10
    assert go(Situation(1000, even - 1), known, DOWN).choice == "stay"
    assert go(Situation(1000, even), known, DOWN).choice == "map"
    unjudged = evidence(perplexity_ratio={"value": None, "low": None, "high": None})
    assert go(Situation(1000, 100), unjudged, DOWN).choice == "reprefill"


def test_a_conversation_beyond_the_target_is_refused() -> None:
    with pytest.raises(InputError, match="at most 8192"):
        go(Situation(8190), evidence())


def test_a_timing_follows_its_points() -> None:
    timing = Timing(((100, 1.0), (200, 3.0)))
    assert timing.seconds(np.array([50, 100, 150, 200, 300])).tolist() == [1, 1, 2, 3, 5]
    assert Timing(((100, 1.0),)).seconds(50) == 0.5
    assert Timing(((100, 2.0), (200, 1.0))).seconds(300) == 1  # never falls on behind its points


@pytest.mark.parametrize(
    "points", [(), ((100, 1.0), (100, 2.0)), ((0, 1.0),), ((10, -1.0),), ((10, float("nan")),)]
)
def test_a_timing_that_was_not_measured_is_refused(points: Any) -> None:
    with pytest.raises(InputError):
        Timing(points)


def test_speeds_go_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    SPEEDS.save(path)
    assert Speeds.load(path) == SPEEDS
    for changed in ({"map": 3}, {"map": {"ten": 1}}, {"source_decode": 0}, {"more": 1}):
        with pytest.raises(InputError):
            Speeds.from_json(json.loads(path.read_text()) | changed)
    # Quoted, since these are a file's own names: a command line would write flags in their place.
    with pytest.raises(
        InputError, match=r"entries 'source_prefill',.* 'repair_window',.*; got none\."
    ):
        Speeds.from_json({})
    with pytest.raises(InputError, match=r"; got 'map', 'more'\."):
        Speeds.from_json({"more": 1, "map": 1})
    with pytest.raises(InputError):
        Speeds.load(tmp_path / "none.json")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(InputError, match="cannot be read as speeds"):
        Speeds.load(deep)


def test_bytes_of_a_token_are_those_of_its_keys_and_values() -> None:
    spec = ModelSpec(
        name="m",
        architecture="qwen3",
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=10,
        max_positions=64,
        rope=RopeParams(kind="default", theta=1e4, rotary_dim=16),
        dtype="bfloat16",
    )
    assert bytes_per_token(spec) == 2 * 3 * 2 * 16 * 2


def test_a_map_and_a_transfer_are_counted_on_both_devices() -> None:
    phases = Phases(source_prefill=4.0, transfer=0.25, map=0.5, repair=0.125, decode=2.0)
    split = compute_of(phases, devices=2)
    assert split == Compute(active=4 + 2 * 0.75 + 0.125 + 2, reserved=2 * 6.875, elapsed=6.875)
    native = compute_of(Phases(source_prefill=4.0, decode=6.0), devices=1)
    assert native == Compute(10, 10, 10)
    assert saving(split, native) == pytest.approx(1 - 7.625 / 10)
