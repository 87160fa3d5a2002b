"""Traffic counted where it is answered: which requests, what leaves when; and no answer notices."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_serve_pipeline import PROMPT, WINDOW, Pair, ask, text_of

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.serve.outcome import Outcome
from trtllm_kvmap.serve.pipeline import Answered
from trtllm_kvmap.serve.request import parse_request
from trtllm_kvmap.serve.target import Event, Job, TargetAnswerer
from trtllm_kvmap.serve.traffic import CONFIG, CountedAnswerer

BATCH = replace(CONFIG, min_documents=3, max_pending=64)
JOINT = CalibrationConfig(joint=True)


@pytest.fixture(scope="module")
def pair(random_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    source = random_model("llama", layers=3, kv_heads=4, seed=1)
    target = random_model("qwen3", head_dim=32)
    return Pair(source, target, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def counted(pair: Pair, tmp_path: Path) -> Iterator[CountedAnswerer]:
    answerer = CountedAnswerer(pair.answerer, tmp_path / "moments", 1.0, BATCH)
    yield answerer
    answerer.close()


def prompt(seed: int, words: int = 50) -> str:
    chosen = np.random.default_rng(seed).choice(PROMPT.split()[1:], words)
    return " ".join(["<bos>", *chosen])


def served(pair: Pair, answerer: CountedAnswerer, **body: Any) -> Answered:
    """The last piece of an answer, when its prompt has been counted. A conversation of its own."""
    body = {"conversation": str(body.get("prompt"))[-200:], **body}
    answered = ask(pair.pipeline(answer=answerer.answer), max_tokens=3, **body)
    if answerer._traffic is not None:
        answerer._traffic.drain()
    return answered[-1]


def taken(answered: Answered) -> str:
    assert answered.last is not None
    return answered.last.traffic


def test_mapped_requests_that_consent_are_counted_as_a_calibration_of_what_was_mapped(
    pair: Pair, counted: CountedAnswerer, tmp_path: Path
) -> None:
    agreed = []
    for seed in range(7):
        consent = seed % 2 == 0
        before = counted.path.exists()
        said = taken(served(pair, counted, prompt=prompt(seed), consent=consent, stream=seed > 3))
        assert said == ("queued" if consent else "")
        agreed += [seed] * consent
        assert before == (len(agreed) > 3 or (len(agreed) == 3 and not consent))
        assert counted.path.exists() == (len(agreed) >= 3)
    assert list((tmp_path / "moments").iterdir()) == [counted.path]
    got = MomentSet.load(counted.path)
    read = [pair.target.tokenise(prompt(seed))[:-WINDOW] for seed in agreed[:3]]
    wanted = calibrate(pair.source, pair.target, read, JOINT, tmp_path / "wanted")
    assert (got.record["documents"], got.record["text"], got.sinks) == (3, [], ())
    assert got.source_fingerprint == pair.source.fingerprint
    for mine, theirs in zip(got.parts, wanted.parts, strict=True):
        assert (mine.slices, mine.targets) == (theirs.slices, theirs.targets)
        assert mine.moments.count == theirs.moments.count
        for a, b in zip(mine.moments.tensors(), theirs.moments.tensors(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-4)


def test_no_answer_notices(pair: Pair, counted: CountedAnswerer) -> None:
    """Answers while prompts wait and are read are those of a target that counts nothing."""
    plain, counting = pair.pipeline(), pair.pipeline(answer=counted.answer)
    for seed in range(12):
        for stream in (False, True):
            body = {"prompt": prompt(seed), "max_tokens": 9, "stream": stream, "consent": True}
            body["conversation"] = f"{seed} {stream}"
            answers = [ask(pipeline, **body) for pipeline in (plain, counting)]
            bodies = [[_fixed(each.body) for each in answered] for answered in answers]
            assert bodies[0] == bodies[1]
    assert counted._traffic is not None
    counted._traffic.drain()
    assert counted._traffic.documents >= 12  # some of them again, in another batch


def test_counting_stands_still_from_the_first_piece_of_an_answer_to_the_last(
    pair: Pair, counted: CountedAnswerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counted._traffic is not None
    quiet, found = counted._traffic._quiet, []
    answerer = Says(Outcome("applied"), lambda: found.append(quiet.asked_for_here))
    monkeypatch.setattr(counted, "answerer", answerer)
    for _ in counted.answer([1] * 20, Job(3), None):
        found.append(quiet.asked_for_here)
    assert (found, quiet.asked_for_here) == ([True, True], False)


def _fixed(body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k not in ("id", "created", "kv_milliseconds")}


def test_what_the_source_did_not_read_or_the_map_refused_is_not_counted(
    pair: Pair, counted: CountedAnswerer
) -> None:
    agreed: dict[str, Any] = {"consent": True}
    assert taken(served(pair, counted, prompt="<bos> after anna ben", **agreed)) == "not_mapped"

    def fails(*_: object) -> Any:
        raise RuntimeError("down")

    (answered,) = ask(pair.pipeline(read=fails, answer=counted.answer), max_tokens=3, **agreed)
    assert taken(answered) == "not_mapped"

    def damaged(*given: Any) -> Any:
        read = pair.reader.read(*given)
        return replace(read, kv=torch.full_like(read.kv, float("nan")))

    (answered,) = ask(pair.pipeline(read=damaged, answer=counted.answer), max_tokens=3, **agreed)
    assert answered.body["kv_reason"].startswith("hand_over_failed")
    assert taken(answered) == "not_mapped"
    assert counted._traffic is not None
    counted._traffic.drain()
    assert (counted._traffic.documents, counted._traffic.failed) == (0, 0)


def test_what_the_guard_took_back_is_counted(
    pair: Pair, counted: CountedAnswerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "answerer", Says(Outcome("fallback_reprefill", "guard", "no")))
    assert taken(served(pair, counted, consent=True)) == "queued"


class Says:
    """In an answerer's place."""

    def __init__(self, outcome: Outcome, called: Callable[[], None] = lambda: None) -> None:
        self.outcome, self.called = outcome, called

    def answer(self, *_: object) -> Iterator[Event]:
        self.called()
        counts = dict.fromkeys(("prompt", "completion", "mapped", "repaired"), 1)
        yield Event("x", self.outcome, "stop", counts)


def test_a_conversation_counts_once_in_a_batch_and_tenants_have_their_own(
    pair: Pair, counted: CountedAnswerer
) -> None:
    def turn(seed: int, **named: str) -> str:
        return taken(served(pair, counted, prompt=prompt(seed), consent=True, **named))

    assert turn(1, conversation="talk", tenant="a") == "queued"
    assert turn(2, conversation="talk", tenant="a") == "repeated"
    assert turn(3, conversation="talk", tenant="b") == "queued"
    assert turn(4, conversation="", tenant="b") == "unnamed"  # it may be a turn of any
    assert not counted.path.exists()


@pytest.mark.parametrize("why", ["folder", "save", "model", "offer"])
def test_the_first_error_is_logged_once_ends_the_counting_and_no_request(
    why: str,
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if why == "folder":
        (tmp_path / "moments").write_text("in the folder's way")

    def breaks(*_: object) -> Any:
        raise RuntimeError("planted")

    if why == "save":
        monkeypatch.setattr(MomentSet, "save", breaks)
    if why == "model":
        monkeypatch.setattr("trtllm_kvmap.calibrate.traffic.captured", breaks)
    if why == "offer":
        monkeypatch.setattr(TrafficMoments, "offer", breaks)
    counted = CountedAnswerer(pair.answerer, tmp_path / "moments", 1.0, BATCH)
    good = {"folder": 0, "save": 3, "model": 1, "offer": 0}[why]
    for number in range(6):
        answered = served(pair, counted, prompt=prompt(number), consent=True)
        assert taken(answered) == ("queued" if number < good else "stopped")
        assert text_of([answered]) == pair.mapped(prompt(number), 3)
    counted._stop(RuntimeError("the other thread's"))
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "traffic is not counted any more" in errors[0].message
    assert ("moments" if why == "folder" else "planted") in errors[0].message
    counted.close()


def test_models_that_cannot_be_counted_are_served(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = replace(pair.target.spec.rope, kind="dynamic", original_length=32, factor=2.0)
    answerer = TargetAnswerer(pair.target, pair.path)
    answerer.loaded = replace(pair.target, spec=replace(pair.target.spec, rope=rope))
    counted = CountedAnswerer(answerer, tmp_path, 1.0, BATCH)
    assert "RoPE of the kind dynamic" in caplog.text
    counted.answerer = Says(Outcome("applied"))  # type: ignore[assignment]
    assert taken(served(pair, counted, consent=True)) == "stopped"
    counted.close()


def test_without_a_map_nothing_is_counted(pair: Pair, tmp_path: Path) -> None:
    counted = CountedAnswerer(TargetAnswerer(pair.target, tmp_path / "none"), tmp_path, 1.0)
    answered = served(pair, counted, consent=True)
    assert (answered.body["kv_status"], taken(answered)) == ("unsupported", "not_mapped")
    counted.close()


def test_the_columns_are_those_that_the_map_was_fitted_from(pair: Pair, tmp_path: Path) -> None:
    asked = CalibrationConfig(skip_first=2, max_tokens=60, layers=(0, 2))
    read = [pair.target.tokenise(prompt(seed)) for seed in range(2)]
    record = calibrate(pair.source, pair.target, read, asked, tmp_path / "m").record
    for records, wanted in (
        ([record], asked),
        ([record, record], JOINT),
        ([{**record, "config": {**record["config"], "weighting": "attention"}}], JOINT),
        ([{**record, "config": {"skip_first": 2}}], CalibrationConfig(skip_first=2)),
        ([{"documents": 2, "tokens": 90}], JOINT),  # made by hand, or by an earlier release
        ([], JOINT),
    ):
        answerer = TargetAnswerer(pair.target, pair.path)
        assert answerer.kvmap is not None
        answerer.kvmap = replace(answerer.kvmap, fitted={"moments": records})
        counted = CountedAnswerer(answerer, tmp_path, 0.5, BATCH)
        assert counted._traffic is not None
        assert counted._traffic.calibration == wanted
        assert counted._traffic.config == replace(BATCH, max_share=0.5)
        counted.close()


def test_consent_is_asked_for_by_name_and_off_by_default() -> None:
    body = {"prompt": "a"}
    assert not parse_request(json.dumps(body), {}).consent
    assert not parse_request(json.dumps(body), {"consent": "true"}).consent
    assert parse_request(json.dumps({**body, "consent": True}), {}).consent
    assert not parse_request(json.dumps({**body, "consent": None}), {}).consent
    for other in ("yes", 1, [True]):
        with pytest.raises(InputError, match="`consent` must be bool"):
            parse_request(json.dumps({**body, "consent": other}), {})
    job = Job(3, counted_as='["tenant", "talk"]')
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert Job(3).counted_as is None


def test_what_serves_holds_no_prompts_out() -> None:
    assert TrafficConfig() != CONFIG
    assert (CONFIG.consent, CONFIG.held_out_every, CONFIG.min_documents) == (True, 0, 50)
