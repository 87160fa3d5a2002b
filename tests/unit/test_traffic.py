"""Moments of traffic: what is counted, what is kept, what leaves, from whom, and when."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.sent import SentKv
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.models import LoadedModel, RemoteModel

FEW = TrafficConfig(consent=True, min_documents=2, held_out_every=3)
JOINT = CalibrationConfig(joint=True)


@pytest.fixture(scope="module", autouse=True)
def _fixed_salt() -> Iterator[None]:
    """Which prompts are held out is drawn by a secret; here it is always the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_bytes", lambda count: b"s" * count)
        yield


def prompts(count: int, tokens: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[1, *rng.integers(2, 60, tokens - 1).tolist()] for _ in range(count)]


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


def test_counted_prompts_give_the_moments_of_a_calibration(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    offered = prompts(20)
    with TrafficMoments(*pair, FEW, JOINT) as traffic:
        taken = [traffic.offer(ids) for ids in offered]
        traffic.drain()
        while "dropped" in taken:  # offered faster than read: offer those again
            for i, outcome in enumerate(taken):
                if outcome == "dropped":
                    taken[i] = traffic.offer(offered[i])
            traffic.drain()
        got, kept = traffic.moments(), traffic.held_out()
        traffic.offer(prompts(1, seed=9)[0], "a")  # later traffic does not change the copy
        traffic.drain()
    counted = [ids for ids, outcome in zip(offered, taken, strict=True) if outcome == "queued"]
    assert 0 < len(kept) < 20
    assert kept == [tuple(i) for i, o in zip(offered, taken, strict=True) if o == "held_out"]
    wanted = calibrate(*pair, counted, JOINT, tmp_path / "moments")
    for mine, theirs in zip(got.parts, wanted.parts, strict=True):
        assert mine.slices == theirs.slices
        assert mine.moments.count == theirs.moments.count
        for a, b in zip(mine.moments.tensors(), theirs.moments.tensors(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-9)
    assert traffic.held_out() == []


def test_nothing_is_taken_without_consent(pair: tuple[LoadedModel, LoadedModel]) -> None:
    assert not TrafficConfig().consent
    before = threading.active_count()
    with TrafficMoments(*pair, TrafficConfig(min_documents=2), JOINT) as traffic:
        assert {traffic.offer(ids) for ids in prompts(5)} == {"no_consent"}
        assert (traffic.documents, traffic.held_out()) == (0, [])
        assert threading.active_count() == before
        with pytest.raises(InputError, match="0 different conversations have been counted"):
            traffic.moments()


def test_no_token_leaves_with_the_moments(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    offered = [[1, 2, 3, 4, *ids] for ids in prompts(12)]  # they all begin alike
    with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:
        for ids in offered:
            assert traffic.offer(ids) == "queued"
        traffic.drain()
        moments = traffic.moments()
    assert moments.sinks == ()
    assert moments.record["text"] == []
    assert set(moments.record) == {"config", "text", "documents", "tokens"}
    moments.save(tmp_path / "m")
    fitted = fit(moments, FitConfig(n=2))
    assert fitted.sinks == ()
    assert str(offered[0][4:8])[1:-1] not in str(fitted.fitted)


def test_memory_is_bounded_and_an_offer_never_waits(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    config = replace(FEW, max_pending=2, held_out_every=1000)
    first, *rest = prompts(8)
    with TrafficMoments(*pair, config, JOINT) as traffic:
        with traffic.answering():
            assert traffic.offer(first) == "queued"
            while traffic._pending.qsize():  # until the thread holds it, and stands still
                pass
            outcomes = [traffic.offer(ids) for ids in rest]
            assert outcomes == ["queued"] * 2 + ["dropped"] * 5
            assert (traffic.documents, traffic.failed) == (0, 0)
        traffic.drain()
        assert (traffic.documents, traffic.failed) == (3, 0)


def test_reading_stops_at_the_next_layer_while_an_answer_is_made(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    """The answer begins between layers 0 and 1 of the target's reading, from another thread."""
    layers: Any = pair[1].model.base_model.layers
    reached, asked, entered = [], threading.Event(), threading.Event()

    def after(layer: int) -> Callable[..., None]:
        def noted(*_: object) -> None:
            reached.append(layer)
            if layer == 0:
                asked.set()
                assert entered.wait(10)

        return noted

    hooks = [layer.register_forward_hook(after(i)) for i, layer in enumerate(layers)]
    try:
        with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:
            traffic.offer(prompts(1)[0])
            assert asked.wait(10)
            with traffic.answering(), traffic.answering():  # two at once
                entered.set()
                traffic._thread.join(0.2)
                assert (reached, traffic.documents) == ([0], 0)
            traffic.drain()
            assert (reached, traffic.documents) == ([0, 1, 2], 1)
    finally:
        for hook in hooks:
            hook.remove()


def test_who_answers_cannot_wait_for_the_count(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """On a thread of its own, so that a wait without end fails the test, and does not hang it."""
    refused: list[str] = []
    done = threading.Event()
    with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:

        def answer() -> None:
            with traffic.answering(), traffic.answering():
                traffic.offer(prompts(1)[0])
                try:
                    traffic.drain()
                except InputError as error:
                    refused.append(str(error))
            traffic.drain()  # its answer has been made
            done.set()

        threading.Thread(target=answer, daemon=True).start()
        assert done.wait(30)
        assert traffic.documents == 1
    assert "Call it after the answer" in "".join(refused)


def test_an_answer_that_another_thread_ends_lets_counting_go_on(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    """As a generator does that is handed on."""
    with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:
        block = traffic.answering()
        block.__enter__()
        thread = threading.Thread(target=block.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        assert traffic._quiet._answering == []
        traffic.offer(prompts(1)[0])
        traffic.drain()
        assert traffic.documents == 1


def test_what_a_source_elsewhere_sent_is_counted_as_if_it_were_read_here(
    pair: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    """And no longer than it was sent; the memory it came in may be used again at once."""
    source, target = pair
    remote = RemoteModel(source.name, source.spec, source.fingerprint)
    config = replace(FEW, held_out_every=0)
    with TrafficMoments(remote, target, config, JOINT) as traffic:
        for number, ids in enumerate(prompts(4)):
            sent = sent_by(source, ids[: 40 - 9 * number])
            assert traffic.offer(ids, "", sent) == "queued"
            sent.keys.fill_(float("nan"))
            sent.values.fill_(float("nan"))
            traffic.drain()
        got = traffic.moments()
    read = [ids[: 40 - 9 * number] for number, ids in enumerate(prompts(4))]
    wanted = calibrate(*pair, read, JOINT, tmp_path / "moments")
    assert got.source_fingerprint == wanted.source_fingerprint
    assert got.record["tokens"] == wanted.record["tokens"] == sum(map(len, read)) - 4 * 4
    for mine, theirs in zip(got.parts, wanted.parts, strict=True):
        for a, b in zip(mine.moments.tensors(), theirs.moments.tensors(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-9)


def sent_by(source: LoadedModel, ids: list[int]) -> SentKv:
    pool = view_pool(prefill(source, ids).cache)
    return SentKv(torch.cat(pool.keys), torch.cat(pool.values), len(ids))


def test_what_was_sent_by_another_model_is_not_counted(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    source, target = pair
    remote = RemoteModel(source.name, source.spec, source.fingerprint)
    ids, sent = prompts(1)[0], sent_by(target, prompts(1)[0])
    good = sent_by(source, ids)
    flat = SentKv(torch.zeros(3), torch.zeros(3), 3)
    unequal = replace(good, values=good.values[:, :, 1:])
    with TrafficMoments(remote, target, replace(FEW, held_out_every=0), JOINT) as traffic:
        for given in (sent, flat, unequal, None):  # of three layers; of no shape; nothing
            assert traffic.offer(ids, "", given) == "unusable"
        assert traffic.offer(ids, "", good.kept(4)) == "unusable"  # too short to add anything
        assert traffic.offer(ids, "", good) == "queued"
        traffic.drain()
        assert (traffic.documents, traffic.failed) == (1, 0)


def test_counting_keeps_to_its_share_of_the_time(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt takes 4 s by this clock, and an answer stands in its way for 100 more."""
    now, rested = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    config = replace(FEW, held_out_every=0, max_share=0.25)
    with TrafficMoments(*pair, config, JOINT) as traffic:
        waiting = traffic._quiet._changed
        monkeypatch.setattr(traffic._quiet, "rest", rested.append)
        monkeypatch.setattr(waiting, "wait_for", lambda _: now.__setitem__(0, now[0] + 100))

        def count(_: object) -> None:
            now[0] += 4
            traffic._quiet.wait()

        monkeypatch.setattr(traffic, "_count", count)
        for ids in prompts(2):
            traffic.offer(ids)
        traffic.drain()
        monkeypatch.undo()
    assert rested[0] == 12


def test_whoever_asked_is_told_after_each_prompt_and_may_stop_the_count(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def after(error: Exception | None) -> None:
        told.append(str(error) if error else traffic.batch_is_full)
        if error:
            traffic.stop()

    traffic = TrafficMoments(*pair, replace(FEW, held_out_every=0), JOINT, after)
    with traffic:
        for ids in prompts(2):
            _counted(traffic, ids)
        choke = traffic._sums.parts[0]
        monkeypatch.setattr(choke, "add", lambda *_: 1 / 0)
        for ids in prompts(3, seed=1):
            traffic.offer(ids)
        traffic.drain()
        assert told == [False, True, "division by zero"]
        assert traffic.offer(prompts(1, seed=2)[0]) == "no_consent"


def test_a_conversation_is_held_out_or_counted_as_a_whole(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    config = replace(FEW, max_held_out=3, max_pending=64, held_out_every=2)
    with TrafficMoments(*pair, config, JOINT) as traffic:
        counted, latest = 0, []
        for number in range(12):
            talk = prompts(3, seed=number)
            first, *others = [_counted(traffic, ids, f"talk {number}") for ids in talk]
            assert others == (["held_out"] * 2 if first == "held_out" else ["repeated"] * 2)
            counted += first == "queued"
            latest += [tuple(talk[-1])] * (first == "held_out")
        assert 3 < len(latest) < 12
        assert traffic.held_out() == latest[-3:]
        assert traffic.documents == counted


def _counted(traffic: TrafficMoments, ids: list[int], name: str = "") -> str:
    taken = traffic.offer(ids, name)
    traffic.drain()
    return taken


def test_sums_leave_in_batches_of_different_conversations(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    config = replace(FEW, min_documents=3, held_out_every=1000)
    own = prompts(9)
    with TrafficMoments(*pair, config, JOINT) as traffic:
        for ids in own[:3]:
            assert _counted(traffic, ids, "one talk") in ("queued", "repeated")
        for name in "abc":
            assert _counted(traffic, own[0], name) == "repeated"  # its tokens are there already
        assert _counted(traffic, own[3]) == "queued"
        with pytest.raises(InputError, match="2 different conversations have been counted"):
            traffic.moments()
        _counted(traffic, own[4])
        first = traffic.moments()
        for ids in (own[5], own[6]):
            _counted(traffic, ids)
            with pytest.raises(InputError, match="since moments last left"):
                traffic.moments()  # the difference would be of too few
        assert _counted(traffic, own[1], "one talk") == "queued"  # of another batch
        second = traffic.moments()
        assert [m.record["documents"] for m in (first, second)] == [3, 6]
        assert traffic.documents == 6


def test_two_of_a_conversation_that_wait_together_are_counted_once(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:
        with traffic.answering():
            assert [traffic.offer(ids, "talk") for ids in prompts(3)] == ["queued"] * 3
        traffic.drain()
        assert traffic.documents == 1


def test_what_waits_is_forgotten_at_the_end(pair: tuple[LoadedModel, LoadedModel]) -> None:
    traffic = TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT)
    with traffic.answering():
        for ids in prompts(5):
            traffic.offer(ids)
        while traffic._pending.qsize() > 4:
            pass
        traffic.close()  # does not wait for the answer
    assert traffic.documents == 1
    assert traffic.offer(prompts(1)[0]) == "no_consent"


def test_an_offer_that_meets_the_end_leaves_nothing_behind(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for side, said in ((0, "held_out"), (1, "queued")):
        traffic = TrafficMoments(*pair, FEW, JOINT)
        first, second = (bytes([side + 3 * number]) for number in range(2))
        monkeypatch.setattr(traffic, "_mark", lambda _, mark=first: mark)
        assert traffic.offer(prompts(1)[0]) == said

        def late(_: str, traffic: TrafficMoments = traffic, mark: bytes = second) -> bytes:
            traffic.close()  # another thread's, once the offer has found the thread at work
            return mark

        monkeypatch.setattr(traffic, "_mark", late)
        assert traffic.offer(prompts(1, seed=1)[0]) == "no_consent"
        assert traffic.held_out() == []
        assert traffic._pending.empty()


UNCLOSED = """
import sys, time
import torch
from trtllm_kvmap import load_model
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.tiny import model_folder

torch.set_num_threads(1)
pair = [load_model(model_folder(name)) for name in ("tiny-s", "tiny-m")]
traffic = TrafficMoments(*pair, TrafficConfig(consent=True, max_pending=64))
for number in range(60):
    traffic.offer([1, *range(2, 60), number + 2] * 8)
while not traffic.documents:
    time.sleep(0.01)
print("waiting", traffic._pending.qsize() > 5)
"""


def test_a_process_that_ends_while_counting_ends_well() -> None:
    ended = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "waiting True\n"), ended.stderr


@pytest.mark.parametrize("name", ["\ud800", None, 7, b"\xff"])
def test_any_name_will_do(pair: tuple[LoadedModel, LoadedModel], name: Any) -> None:
    with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:
        assert _counted(traffic, prompts(1)[0], name) == "queued"
        assert traffic.documents == 1


@pytest.mark.parametrize("ids", [None, 5, "text", [1.5] * 9, [None] * 9, {}, [[1] * 9] * 9])
def test_an_offer_of_anything_raises_nothing(
    pair: tuple[LoadedModel, LoadedModel], ids: Any
) -> None:
    with TrafficMoments(*pair, FEW, JOINT) as traffic:
        assert traffic.offer(ids) == "unusable"


@pytest.mark.parametrize("ids", [[], [1, 2, 3], [1] * 9 + [10_000], [-1] * 9])
def test_a_prompt_that_cannot_be_read_is_no_failure(
    pair: tuple[LoadedModel, LoadedModel], ids: list[int]
) -> None:
    with TrafficMoments(*pair, FEW, JOINT) as traffic:
        assert traffic.offer(ids) == "unusable"


def test_a_prompt_that_a_model_chokes_on_is_counted_as_failed(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choke(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("trtllm_kvmap.calibrate.traffic.captured", choke)
    with TrafficMoments(*pair, replace(FEW, held_out_every=1000), JOINT) as traffic:
        for ids in prompts(3):
            traffic.offer(ids)
        traffic.drain()
        assert (traffic.documents, traffic.failed) == (0, 3)


def test_sums_that_lack_half_a_prompt_are_not_given_out(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(FEW, held_out_every=1000)
    with TrafficMoments(*pair, config, CalibrationConfig()) as traffic:
        for ids in prompts(2):
            _counted(traffic, ids)
        _, values = traffic._sums.parts

        def out_of_memory(*_: object) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(values, "add", out_of_memory)
            _counted(traffic, prompts(1, seed=1)[0])
        _counted(traffic, prompts(1, seed=2)[0])
        assert (traffic.documents, traffic.failed) == (2, 1)
        with pytest.raises(UnavailableError, match="some of the sums only"):
            traffic.moments()


def test_settings_are_checked(pair: tuple[LoadedModel, LoadedModel]) -> None:
    with pytest.raises(InputError, match="held_out_every must be 0"):
        TrafficConfig(held_out_every=1)
    with pytest.raises(InputError, match="max_share must lie above 0"):
        TrafficConfig(max_share=0)
    with pytest.raises(InputError, match="uniform"):
        TrafficMoments(*pair, FEW, CalibrationConfig(weighting="sensitivity"))
    source, target = pair
    changing = replace(target.spec.rope, kind="dynamic", original_length=32, factor=2.0)
    other = replace(target, spec=replace(target.spec, rope=changing))
    with pytest.raises(InputError, match="RoPE of the kind dynamic"):
        TrafficMoments(source, other, FEW, JOINT)
