"""The pipeline's control flow on FAKE stages: every way to fail ends in the target's own answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from engine_fake_stages import DRAFTS, KNOWN, MAX_TOKENS, FakeStages, manifest, spec, wait_until

from trtllm_kvmap.engine.executor import PipelineExecutor
from trtllm_kvmap.engine.request import PipelineRequest
from trtllm_kvmap.engine.stages import Deadline
from trtllm_kvmap.errors import InputError, UnavailableError

PROMPT = tuple(range(10, 31))  # 21 tokens: 16 are mapped, in blocks of 4, before a repair window
MAPPED = 16
ANSWER = tuple(range(21, 29))


@contextmanager
def pipeline(stages: FakeStages, **changes: object) -> Iterator[PipelineExecutor]:
    executor = PipelineExecutor(manifest(**changes), stages, stages, stages)
    try:
        yield executor
    finally:
        executor.shutdown()


def ask(stages: FakeStages, **changes: object):
    with pipeline(stages) as executor:
        request = PipelineRequest(**{"token_ids": PROMPT, "max_tokens": 8, **changes})
        return executor.submit(request).result(timeout=60)


def test_a_handover() -> None:
    stages = FakeStages()
    answer = ask(stages, draft_token_ids=(1, 2))
    assert stages.stages() == ["read", "map", "land", "answer"]
    ((read, salt),) = stages.asked_for("read")
    assert read == PROMPT[:MAPPED]  # the source reads nothing that will not be mapped
    assert stages.asked_for("land") == [(PROMPT[:MAPPED], PROMPT[MAPPED], salt)]
    assert stages.asked_for("answer") == [(PROMPT, 8, (1, 2), salt)]
    assert (answer.token_ids, answer.finish_reason) == (ANSWER, "length")
    status = answer.status
    assert (status.state, status.reason) == ("applied", "")
    assert (status.sink, status.mapped, status.sink_missed) == (1, MAPPED - 1, 1)
    assert status.computed == len(PROMPT) - MAPPED
    assert (stages.released, stages.forgotten) == ([1001], [])


def test_the_tokens_come_as_they_are_made() -> None:
    seen: list[int] = []

    def at(stage: str, deadline: Deadline) -> None:
        if stage == "answer":
            seen.append(-1)

    with pipeline(FakeStages(at=at)) as executor:
        handle = executor.submit(PipelineRequest(PROMPT, 8, end_id=24))
        for token in handle:
            seen.append(token)
        assert seen == [-1, 21, 22, 23, 24]
        answer = handle.result()
        assert (answer.token_ids, answer.finish_reason) == ((21, 22, 23, 24), "stop")


def test_every_request_has_a_salt_of_its_own() -> None:
    stages = FakeStages()
    with pipeline(stages) as executor:
        requests = [
            PipelineRequest(PROMPT, 8, tenant=tenant, conversation="c")
            for tenant in ("a", "a", "b", "")
        ]
        for handle in [executor.submit(request) for request in requests]:
            assert handle.result(timeout=60).token_ids == ANSWER
    salts = [entry[-1] for entry in stages.asked_for("answer")]
    assert len(set(salts)) == len(salts) == 4
    assert all(0 < salt < 1 << 63 for salt in salts)


@pytest.mark.parametrize("stage", ["read", "map", "land"])
def test_a_stage_that_fails_ends_in_the_targets_own_answer(stage: str) -> None:
    def at(name: str, deadline: Deadline) -> None:
        if name == stage:
            raise ValueError("no such luck")

    stages = FakeStages(at=at)
    answer = ask(stages)
    assert answer.token_ids == ANSWER
    assert answer.status.state == "fallback_reprefill"
    assert answer.status.reason == "ValueError: no such luck"
    assert answer.status.computed == len(PROMPT)
    assert [entry[-1] for entry in stages.asked_for("answer")] == [None]  # no salt: nothing mapped
    assert stages.released == ([1001] if stage == "land" else [])
    assert stages.forgotten == ([1] if stage == "map" else [])


@pytest.mark.parametrize("stage", ["read", "map", "land"])
def test_a_stage_that_takes_too_long(stage: str) -> None:
    def at(name: str, deadline: Deadline) -> None:
        while name == stage:
            deadline.wait("The fake stage")

    answer = ask(FakeStages(at=at), handoff_seconds=0.05)
    assert answer.token_ids == ANSWER
    assert answer.status.state == "fallback_reprefill"
    assert "The fake stage took too long" in answer.status.reason


def test_no_time_for_a_handover_at_all() -> None:
    stages = FakeStages()
    answer = ask(stages, handoff_seconds=0.0)
    assert answer.token_ids == ANSWER
    assert stages.stages() == ["answer"]


@pytest.mark.parametrize("tokens", [0, 3])
def test_mapped_kv_that_fails_in_the_answer(tokens: int) -> None:
    stages = FakeStages(break_after=tokens)
    with pipeline(stages) as executor:
        handle = executor.submit(PipelineRequest(PROMPT, 8, draft_token_ids=(7,)))
        assert list(handle) == list(ANSWER)  # no token twice, none left out
        answer = handle.result()
    assert answer.token_ids == ANSWER
    assert answer.status.state == "fallback_reprefill"
    assert f"RuntimeError after {tokens} tokens on mapped KV" in answer.status.reason
    first, second = stages.asked_for("answer")
    assert first[-1] is not None
    assert second == (PROMPT + ANSWER[:tokens], 8 - tokens, () if tokens else (7,), None)


def test_a_target_that_cannot_answer_is_an_error() -> None:
    def at(name: str, deadline: Deadline) -> None:
        if name == "answer":
            raise UnavailableError("the target is gone")

    stages = FakeStages(at=at)
    with pipeline(stages) as executor:
        handle = executor.submit(PipelineRequest(PROMPT, 8))
        with pytest.raises(UnavailableError, match="the target is gone"):
            list(handle)
        with pytest.raises(UnavailableError, match="the target is gone"):
            handle.result(timeout=60)
    assert stages.stages() == ["read", "map", "land", "answer", "answer"]


def test_an_answer_that_takes_too_long_is_an_error() -> None:
    def at(name: str, deadline: Deadline) -> None:
        while name == "answer":
            deadline.wait("The target's answer")

    with pipeline(FakeStages(at=at)) as executor:
        handle = executor.submit(PipelineRequest(PROMPT, 8, answer_seconds=0.05))
        with pytest.raises(UnavailableError, match="took too long"):
            handle.result(timeout=60)


@pytest.mark.parametrize("stage", ["read", "map", "land", "answer"])
def test_a_request_cancelled_while_a_stage_runs(stage: str) -> None:
    begun: list[str] = []

    def at(name: str, deadline: Deadline) -> None:
        begun.append(name)
        while name == stage:
            deadline.wait("The fake stage")

    stages = FakeStages(at=at)
    with pipeline(stages) as executor:
        handle = executor.submit(PipelineRequest(PROMPT, 8))
        wait_until(lambda: stage in begun)
        handle.cancel()
        answer = handle.result(timeout=60)
    assert (answer.token_ids, answer.finish_reason) == ((), "cancelled")
    assert stages.released == ([1001] if stage in ("land", "answer") else [])
    assert stages.forgotten == ([1] if stage == "map" else [])


def test_a_request_cancelled_between_tokens() -> None:
    with pipeline(FakeStages(hold_after=3)) as executor:
        handle = executor.submit(PipelineRequest(PROMPT, 8))
        tokens = iter(handle)
        first = [next(tokens) for _ in range(3)]
        handle.cancel()
        answer = handle.result(timeout=60)
        assert list(tokens) == []
    assert first == list(answer.token_ids) == list(ANSWER[:3])
    assert (answer.finish_reason, answer.status.state) == ("cancelled", "applied")


def test_landed_blocks_that_the_engine_did_not_find() -> None:
    none = ask(FakeStages(finds=lambda landed: 0)).status
    assert none.state == "fallback_reprefill"
    assert "did not find the landed blocks" in none.reason
    some = ask(FakeStages(finds=lambda landed: 4)).status
    assert (some.state, some.sink, some.mapped) == ("applied", 1, 3)
    assert some.computed == len(PROMPT) - 4
    silent = ask(FakeStages(finds=lambda landed: None)).status
    assert (silent.state, silent.mapped) == ("applied", MAPPED - 1)


def test_a_prompt_too_short_to_map() -> None:
    stages = FakeStages()
    answer = ask(stages, token_ids=PROMPT[:6])
    assert answer.status.state == "fallback_reprefill"
    assert answer.status.reason == "the prompt is too short to map"
    assert stages.stages() == ["answer"]


def test_tokens_that_the_source_does_not_know() -> None:
    stages = FakeStages()
    with pipeline(stages, source=spec("small", vocab_size=20)) as executor:
        answer = executor.submit(PipelineRequest(PROMPT, 8)).result(timeout=60)
    assert (answer.status.state, answer.token_ids) == ("unsupported", ANSWER)
    assert "the source knows only the tokens 0 to 19" in answer.status.reason
    assert stages.stages() == ["answer"]


def test_the_relay_is_let_go_when_the_target_has_taken_it_or_cannot() -> None:
    stages = FakeStages()
    with pipeline(stages) as executor:
        handles = [executor.submit(PipelineRequest(PROMPT, 8)) for _ in range(12)]
        assert [handle.result(timeout=60).token_ids for handle in handles] == [ANSWER] * 12
    assert sorted(stages.released) == [1001 + n for n in range(12)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": ()}, "0 prompt tokens"),
        ({"max_tokens": 0}, "asks for 0"),
        ({"max_tokens": MAX_TOKENS}, f"max_tokens of {MAX_TOKENS}"),
        ({"draft_token_ids": (1,) * (DRAFTS + 1)}, f"at most {DRAFTS}"),
        ({"token_ids": (KNOWN,)}, f"not {KNOWN}"),
        ({"draft_token_ids": (-1,)}, "not -1"),
        ({"handoff_seconds": -1.0}, "must not be negative"),
    ],
)
def test_a_request_no_engine_can_take(changes: dict[str, object], said: str) -> None:
    stages = FakeStages()
    with pytest.raises(InputError, match=said):
        ask(stages, **changes)
    assert stages.stages() == []
