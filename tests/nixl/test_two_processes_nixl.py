"""A source and a target as two processes on NIXL, and either killed at every stage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dying_workers import SOURCE_STAGES, TARGET_STAGES, DyingPair

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.signals import BANDS, measure_signals
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.serve.processes.front import WorkerPair
from trtllm_kvmap.serve.processes.work import Answer, PairSettings
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder as tiny_folder

NEW_TOKENS = 6
# Short, so that the blocks of a killed target come back soon; half of it is for reading.
LEASE_SECONDS = 3.0
# 475 of the prompt's 507 tokens travel, in 15 blocks: a second request has room only when the first
# one's blocks came back.
NUM_BLOCKS = 15


@pytest.fixture(scope="module")
def pair(
    tiny_map: Path, nixl_api: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DyingPair]:
    settings = PairSettings(
        str(tiny_folder("tiny-s")),
        str(tiny_folder("tiny-m")),
        str(tiny_map),
        num_blocks=NUM_BLOCKS,
        lease_seconds=LEASE_SECONDS,
        wait_seconds=30.0,
        allow_unproven=True,
    )
    with DyingPair(settings, tmp_path_factory.mktemp("stages") / "stage") as dying:
        yield dying


@pytest.fixture(scope="module")
def own_answer(tiny_pair: tuple[LoadedModel, LoadedModel], prompt: list[int]) -> tuple[int, ...]:
    """What the target says when it reads the prompt itself."""
    target = tiny_pair[1]
    read = prefill(target, prompt)
    return tuple(generate(target, read.cache, read.logits[-1], NEW_TOKENS))


@pytest.fixture(scope="module")
def mapped_answer(
    tiny_pair: tuple[LoadedModel, LoadedModel], tiny_map: Path, prompt: list[int]
) -> tuple[int, ...]:
    """What it says after a hand-over in one process, without any exchange."""
    source, target = tiny_pair
    bridge = KvBridge(KvMap.load(tiny_map, allow_unproven=True), source=source, target=target)
    plan = plan_handoff(len(prompt), first_tokens=1, repair_window=32)
    read = prefill(source, prompt[: plan.mapped.stop])
    handoff = bridge.hand_over(read.cache, prompt, plan)
    return tuple(generate(target, handoff.cache, handoff.logits, NEW_TOKENS))


def ask_until_applied(pair: WorkerPair, prompt: list[int]) -> Answer:
    """The first answer on mapped blocks; until a lease has run out there are no free blocks."""
    for _ in range(8):
        answer = pair.ask(prompt, NEW_TOKENS)
        if answer.status.state == "applied":
            return answer
        time.sleep(LEASE_SECONDS)
    raise AssertionError(f"the blocks did not come back: {answer.status}")


def test_blocks_travel_and_the_answer_is_that_of_one_process(
    pair: DyingPair, prompt: list[int], mapped_answer: tuple[int, ...]
) -> None:
    ask_until_applied(pair, prompt)  # agents are made and meet, which may outlast a short lease
    pids = set()
    for _ in range(2):  # the same agents, and the same blocks
        answer = pair.ask(prompt, NEW_TOKENS)
        assert answer.status.state == "applied", answer.status
        assert answer.token_ids == mapped_answer
        assert answer.status.mapped == len(prompt) - 32 - 1
        pids.add((pair.source.pid, pair.target.pid))
    assert len(pids) == 1


def test_the_same_over_shared_memory(
    tiny_map: Path, prompt: list[int], mapped_answer: tuple[int, ...]
) -> None:
    settings = PairSettings(
        str(tiny_folder("tiny-s")),
        str(tiny_folder("tiny-m")),
        str(tiny_map),
        transport="shared_memory",
        num_blocks=NUM_BLOCKS,
        wait_seconds=30.0,
        allow_unproven=True,
    )
    with WorkerPair(settings) as pair:
        for _ in range(2):  # the second time in blocks that the first gave back
            answer = pair.ask(prompt, NEW_TOKENS)
            assert answer.status.state == "applied", answer.status
            assert answer.token_ids == mapped_answer
        target, killed = pair.target.pid, pair.source.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        answer = ask_until_applied(pair, prompt)  # its successor's memory is another
        assert answer.token_ids == mapped_answer
        assert (pair.target.pid, pair.source.pid == killed) == (target, False)


@pytest.mark.parametrize("above", [True, False], ids=["below the limit", "above the limit"])
def test_the_maps_guard_decides_as_in_one_process(
    tiny_pair: tuple[LoadedModel, LoadedModel],
    tiny_map: Path,
    tmp_path: Path,
    prompt: list[int],
    own_answer: tuple[int, ...],
    mapped_answer: tuple[int, ...],
    above: bool,
) -> None:
    """One that weighs losses and recall, and a limit close by the score in one process."""
    source, target = tiny_pair
    kvmap = KvMap.load(tiny_map, allow_unproven=True)
    bridge = KvBridge(kvmap, source=source, target=target)
    drifts = 2 * min(BANDS, target.spec.num_layers)
    plan = plan_handoff(len(prompt), first_tokens=1, repair_window=32)
    read = prefill(source, prompt)
    made = bridge.hand_over(read.cache, prompt, plan)
    signals = measure_signals(bridge, read.cache, prompt, made, recall=True)
    count = len(signals.to_features()) - drifts
    weights = (*[1.0] * count, *[0.0] * drifts)
    free = Guard((*weights, 1.0), 0.0, 0.0, {"S": 1, "N": 8})
    score = Guard(weights, 0.0, 0.0, {}, free).judge(signals).drift
    limit = score + (1e-3 if above else -1e-3)
    guard = Guard(weights, 0.0, -1e9 if above else 1e9, {}, replace(free, limit=limit))
    kvmap.with_guard(guard.to_json()).save(tmp_path / "guarded")
    settings = PairSettings(
        str(tiny_folder("tiny-s")),
        str(tiny_folder("tiny-m")),
        str(tmp_path / "guarded"),
        transport="shared_memory",
        num_blocks=NUM_BLOCKS + 1,  # the repaired tokens travel too
        wait_seconds=30.0,
        allow_unproven=True,
    )
    with WorkerPair(settings) as pair:
        answer = pair.ask(prompt, NEW_TOKENS)
    print(answer.status)
    if above:
        assert (answer.status.state, answer.token_ids) == ("applied", mapped_answer)
    else:
        assert answer.status.state == "fallback_reprefill"
        assert answer.status.reason.startswith("guard: it scores this hand-over")
        assert answer.token_ids == own_answer
    assert "with S 1, N 8, and this one has S 1, N 32" in answer.unlike


@pytest.mark.parametrize("stage", SOURCE_STAGES)
def test_source_killed(
    pair: DyingPair,
    prompt: list[int],
    own_answer: tuple[int, ...],
    mapped_answer: tuple[int, ...],
    stage: str,
) -> None:
    ask_until_applied(pair, prompt)
    killed = pair.source.pid
    pair.stages.write_text(stage)
    answer = pair.ask(prompt, NEW_TOKENS)
    assert pair.stages.read_text() == "", "the source did not reach the stage"
    assert answer.status.state == "fallback_reprefill"
    assert answer.status.reason
    print(f"{stage}: {answer.status.reason}")
    assert answer.token_ids == own_answer
    again = ask_until_applied(pair, prompt)
    assert again.token_ids == mapped_answer
    assert pair.source.pid != killed


def test_source_killed_after_everything_was_read(
    pair: DyingPair, prompt: list[int], mapped_answer: tuple[int, ...]
) -> None:
    """Every block was there and checked: its death changes nothing any more."""
    ask_until_applied(pair, prompt)
    pair.stages.write_text("when End comes")
    answer = pair.ask(prompt, NEW_TOKENS)
    assert (answer.status.state, answer.token_ids) == ("applied", mapped_answer)
    ask_until_applied(pair, prompt)


@pytest.mark.parametrize("stage", TARGET_STAGES)
def test_target_killed(
    pair: DyingPair,
    prompt: list[int],
    own_answer: tuple[int, ...],
    mapped_answer: tuple[int, ...],
    stage: str,
) -> None:
    ask_until_applied(pair, prompt)
    source, killed = pair.source.pid, pair.target.pid
    pair.stages.write_text(stage)
    answer = pair.ask(prompt, NEW_TOKENS)
    assert pair.stages.read_text() == "", "the target did not reach the stage"
    assert answer.status.state == "fallback_reprefill"
    assert answer.status.reason == "the target's worker died"
    assert answer.token_ids == own_answer
    again = ask_until_applied(pair, prompt)
    assert again.token_ids == mapped_answer
    assert pair.target.pid != killed
    assert pair.source.pid == source  # and its blocks came back without it dying


def test_answers_differ_when_the_blocks_do(
    own_answer: tuple[int, ...], mapped_answer: tuple[int, ...]
) -> None:
    """Otherwise the tests above could not tell the two ways apart."""
    assert torch.tensor(own_answer).shape == torch.tensor(mapped_answer).shape
    assert own_answer != mapped_answer
