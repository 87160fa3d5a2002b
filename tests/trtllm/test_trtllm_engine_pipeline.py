"""The engine lane from weights to answers, on FAKE TensorRT and TensorRT-LLM packages with the real
tiny models behind them: what answers is what the relay's map wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_world import FIRST_TOKENS, REPAIR_WINDOW, World
from fake_engine_host import fake_lane
from fake_engine_world import WORLD
from fake_engines import Executor

from trtllm_kvmap.engine.build import build_pipeline
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.request import PipelineRequest
from trtllm_kvmap.engine.stages import CancelledError, Deadline
from trtllm_kvmap.errors import FormatError, MismatchError, UnprovenError

SIZE, STEPS, ROOM = 32, 12, 2
CONFIG = PipelineConfig(
    tokens_per_block=SIZE,
    max_tokens=512,
    relay_requests=ROOM,
    first_tokens=FIRST_TOKENS,
    repair_window=REPAIR_WINDOW,
)


@dataclass
class Built:
    world: World
    folder: Path
    lane: SimpleNamespace

    def open(self) -> Any:
        return self.lane.open.open_pipeline(self.folder, allow_unproven=True)

    def mapped_end(self, prompt: list[int]) -> int:
        return (len(prompt) - REPAIR_WINDOW) // SIZE * SIZE

    def request(self, prompt: list[int], **changes: Any) -> PipelineRequest:
        return PipelineRequest(tuple(prompt), STEPS, **changes)


@pytest.fixture(scope="module")
def built(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("pipeline")
    with fake_lane(folder) as lane:
        build_pipeline(
            world.source.model.config.name_or_path,
            world.target.model.config.name_or_path,
            world.path,
            folder / "built",
            CONFIG,
            lane.builders.TensorRtBuilders(),
            allow_unproven=True,
        )
        yield Built(world, folder / "built", lane)


@pytest.fixture(autouse=True)
def nothing_is_stalled() -> Iterator[None]:
    yield
    WORLD.stalled.clear()


def blocks_in_use() -> list[int]:
    """Of every relay pool that is allocated: blocks that are not poison."""
    return [int((~pool.isnan()).flatten(1).any(1).sum()) for pool in WORLD.pools.values()]


def test_a_mapped_request_answers_as_the_hf_lane_does(built: Built) -> None:
    world, prompt = built.world, built.world.prompt(1)
    expected = world.expect(prompt, STEPS, end=built.mapped_end(prompt))
    fetched = len(WORLD.fetched)
    with built.open() as executor:
        handle = executor.submit(built.request(prompt))
        assert list(handle) == expected.token_ids
        answer = handle.result()
        assert blocks_in_use() == [0, 0]
    assert answer.finish_reason == "length"
    status = answer.status
    assert (status.state, status.reason) == ("applied", "")
    assert status.sink == world.sink_of(prompt)
    assert status.matched == built.mapped_end(prompt) > 2 * SIZE
    assert len(WORLD.fetched) - fetched == 2  # into the relay, and out of it
    assert WORLD.pools == {}


def test_other_kv_gives_another_answer(built: Built) -> None:
    """The answer above stands on the mapped blocks: with those of another prompt it differs."""
    prompt, other = built.world.prompt(1), built.world.prompt(2)
    end = built.mapped_end(prompt)
    right = built.world.expect(prompt, STEPS, end=end)
    wrong = built.world.expect(prompt, STEPS, end=end, read=other)
    assert float((right.logits - wrong.logits).abs().max()) > 1
    with built.open() as executor:
        relay = executor._relay
        received = relay._receive

        def mixed_up(handover: Any, state: Any, tokens: Any, deadline: Any) -> None:
            received(handover, state, tokens, deadline)
            for views in (relay._source.pool.keys, relay._source.pool.values):
                for view in views:
                    view.copy_(view.flip(0).nan_to_num(0.0))

        relay._receive = mixed_up
        answer = executor.submit(built.request(prompt)).result(timeout=120)
    assert answer.status.state == "applied"
    assert list(answer.token_ids) != right.token_ids


def test_many_at_once_do_not_mix(built: Built) -> None:
    prompts = [built.world.prompt(seed, words=90 + 15 * seed) for seed in range(3, 8)]
    with built.open() as executor:
        handles = [executor.submit(built.request(prompt)) for prompt in prompts]
        answers = [handle.result(timeout=120) for handle in handles]
        assert blocks_in_use() == [0, 0]
    for prompt, answer in zip(prompts, answers, strict=True):
        end = built.mapped_end(prompt)
        assert list(answer.token_ids) == built.world.expect(prompt, STEPS, end=end).token_ids
        assert answer.status.matched == end


def test_mapped_blocks_answer_nobody_else(built: Built) -> None:
    prompt = built.world.prompt(9)
    native = built.world.native(prompt, STEPS).token_ids
    with built.open() as executor:
        mapped = executor.submit(built.request(prompt)).result(timeout=120)
        assert mapped.status.state == "applied"
        target = executor._target
        deadline = Deadline.after(60)
        pieces = list(target.answer(prompt, STEPS, None, (), None, deadline))
        assert [token for piece in pieces for token in piece.token_ids] == native
        assert pieces[-1].reused_tokens == 0
        # The same plain prompt again finds its own, exact blocks.
        pieces = list(target.answer(prompt, STEPS, None, (), None, deadline))
        assert pieces[-1].reused_tokens == (len(prompt) - 1) // SIZE * SIZE


def test_drafts_and_an_end_token(built: Built) -> None:
    prompt = built.world.prompt(1)
    expected = built.world.expect(prompt, STEPS, end=built.mapped_end(prompt)).token_ids
    stop = expected[4]
    with built.open() as executor:
        request = built.request(prompt, end_id=stop, draft_token_ids=(1, 2, 3))
        answer = executor.submit(request).result(timeout=120)
    first = expected.index(stop)
    assert answer.token_ids == tuple(expected[: first + 1])
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("where", ["relay", "target"])
def test_a_transfer_that_does_not_begin(built: Built, where: str) -> None:
    prompt = built.world.prompt(1)
    native = built.world.native(prompt, STEPS).token_ids
    WORLD.stalled.add(where)
    with built.open() as executor:
        for _ in range(ROOM + 1):  # room is given back each time, or the last would wait for it
            answer = executor.submit(built.request(prompt, handoff_seconds=0.3)).result(timeout=120)
            assert list(answer.token_ids) == native
            assert answer.status.state == "fallback_reprefill"
            part = {"relay": "from the source to the relay", "target": "taking of mapped KV"}
            assert f"{part[where]} took too long" in answer.status.reason
        assert blocks_in_use() == [0, 0]
        source = Executor._started[-2]
        assert source._cache._sequences == {}  # nothing waits there to be fetched
        WORLD.stalled.clear()
        again = executor.submit(built.request(prompt)).result(timeout=120)
        assert again.status.state == "applied"


def test_blocks_of_a_transfer_that_has_begun_are_kept(built: Built) -> None:
    prompt = built.world.prompt(1)
    WORLD.stalled |= {"relay", "begun"}
    with built.open() as executor:
        manager = executor._relay._source._manager
        for _ in range(ROOM):
            answer = executor.submit(built.request(prompt, handoff_seconds=0.2)).result(timeout=120)
            assert "from the source to the relay" in answer.status.reason
        assert len(manager._sequences) == ROOM  # a peer may still write into them
        answer = executor.submit(built.request(prompt, handoff_seconds=0.2)).result(timeout=120)
        assert "Waiting for room in the relay took too long" in answer.status.reason
        assert list(answer.token_ids) == built.world.native(prompt, STEPS).token_ids


def test_a_map_that_wrote_less_than_it_was_asked(built: Built) -> None:
    prompt = built.world.prompt(1)
    with built.open() as executor:
        target = executor._relay._target
        whole = target.block_offsets

        def a_block_less(request_id: int, max_blocks: int) -> torch.Tensor:
            offsets = whole(request_id, max_blocks)
            offsets[..., 1] = -1
            return offsets

        target.block_offsets = a_block_less
        answer = executor.submit(built.request(prompt)).result(timeout=120)
        assert blocks_in_use() == [0, 0]
    rest = built.mapped_end(prompt) - built.world.sink_of(prompt)
    assert f"mapped {rest - SIZE} of {rest} tokens" in answer.status.reason
    assert list(answer.token_ids) == built.world.native(prompt, STEPS).token_ids


def test_a_request_that_is_given_up_is_stopped_in_its_engine(built: Built) -> None:
    with built.open() as executor:
        engine = Executor._started[-1]
        deadline = Deadline.after(60)
        answer = executor._target.answer(built.world.prompt(1), STEPS, None, (), None, deadline)
        assert len(next(answer).token_ids) == 1
        assert len(engine._running) == 1
        deadline.cancelled.set()
        with pytest.raises(CancelledError):
            next(answer)
        assert engine._running == {}


def test_a_peer_of_another_shape(built: Built) -> None:
    """Source and target cannot exchange directly: that is what the relay is for."""
    prompt = built.world.prompt(1)
    with built.open() as executor:
        deadline = Deadline.after(60)
        state = executor._source.read(prompt[:64], 7, deadline)
        with pytest.raises(Exception, match=r"a peer of \(3, 2, 32, 32\) cannot give to one of"):
            executor._target.land(prompt[:64], prompt[64], state, 7, deadline)


def test_requests_are_answered_before_the_engines_shut_down(built: Built) -> None:
    prompt = built.world.prompt(1)
    with built.open() as executor:
        handle = executor.submit(built.request(prompt))
    assert handle.result(timeout=0).status.state == "applied"
    assert all(engine._running == {} for engine in Executor._started)


def test_a_folder_that_is_not_as_built(built: Built, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="There is no"), built.lane.open.open_pipeline(tmp_path):
        pass
    with (
        pytest.raises(UnprovenError, match="no evidence"),
        built.lane.open.open_pipeline(built.folder),
    ):
        pass


def test_another_version_than_built_it(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built.lane.host, "VERSION", "1.2.0")
    with pytest.raises(MismatchError, match=r"built with .*1\.2\.1"), built.open():
        pass


def test_the_fake_pool_is_poisoned(built: Built) -> None:
    pool = built.lane.relay_pool.RelayPool(built.world.target.spec, CONFIG)
    assert pool.num_blocks == ROOM * CONFIG.max_blocks
    assert bool(torch.stack(pool.pool.keys).isnan().all())
    pool.close()
