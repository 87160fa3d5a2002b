"""The serving pipeline in one process: the same halves that the Triton models run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evidence_case import DIGEST, vouched
from handmade_maps import random_map
from test_routing import evidence as report
from transformers import AutoTokenizer

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.routing.speeds import Speeds, Timing
from trtllm_kvmap.errors import FormatError, InputError, UnavailableError
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.serve.map_header import MapHeader
from trtllm_kvmap.serve.metrics import ALL, Counters
from trtllm_kvmap.serve.outcome import Outcome
from trtllm_kvmap.serve.pipeline import Answered, Pipeline, PipelineConfig
from trtllm_kvmap.serve.policy import Routed
from trtllm_kvmap.serve.source import SourceReader
from trtllm_kvmap.serve.target import Event, Job, TargetAnswerer
from trtllm_kvmap.spec.plan import plan_handoff

WORDS = ["<bos>", *["after anna ben near old river stood near cold stone"] * 6]
PROMPT = " ".join(WORDS)
WINDOW = 8


class Pair:
    """A random pair, its map in a file, and the halves around it."""

    def __init__(self, source: LoadedModel, target: LoadedModel, folder: Path) -> None:
        self.source, self.target = source, target
        self.kvmap = vouched(random_map(source, target))
        self.path = folder / "pair.kvmap.safetensors"
        self.kvmap.save(self.path)
        self.reader = SourceReader(source, max_held_tokens=200)
        self.answerer = TargetAnswerer(target, self.path)

    def pipeline(self, **changed: Any) -> Pipeline:
        config = PipelineConfig(
            name="pipeline",
            max_positions=self.target.spec.max_positions,
            mapper_id="pair",
            repair_window=WINDOW,
        )
        given = {"read": self.reader.read, "answer": self.answerer.answer, **changed}
        return Pipeline(config, self.target.tokenizer, **given)

    def native(self, prompt: str, count: int) -> str:
        read = prefill(self.target, self.target.tokenise(prompt), logits_to_keep=1)
        return self._text(generate(self.target, read.cache, read.logits[-1], count))

    def mapped(self, prompt: str, count: int) -> str:
        ids = self.target.tokenise(prompt)
        bridge = KvBridge(self.kvmap, source=self.source, target=self.target)
        plan = plan_handoff(len(ids), repair_window=WINDOW)
        ready = bridge.hand_over(prefill(self.source, ids).cache, ids, plan)
        return self._text(generate(self.target, ready.cache, ready.logits, count))

    def _text(self, tokens: list[int]) -> str:
        return self.target.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def pair(random_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    source = random_model("llama", layers=3, kv_heads=4, seed=1)
    target = random_model("qwen3", head_dim=32)
    return Pair(source, target, tmp_path_factory.mktemp("pair"))


def ask(pipeline: Pipeline, parameters: dict | None = None, **body: Any) -> list[Answered]:
    return list(pipeline.respond(json.dumps({"prompt": PROMPT, **body}), parameters or {}))


def text_of(answered: list[Answered]) -> str:
    return "".join(each.body["choices"][0]["text"] for each in answered)


def test_an_answer_is_the_mapped_targets_with_its_counts(pair: Pair) -> None:
    (answered,) = ask(pair.pipeline(), max_tokens=12)
    assert text_of([answered]) == pair.mapped(PROMPT, 12) != pair.native(PROMPT, 12)
    body = answered.body
    assert (body["kv_status"], body["kv_reason"]) == ("applied", "")
    tokens = len(pair.target.tokenise(PROMPT))
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": 12,
        "total_tokens": tokens + 12,
        "mapped_tokens": tokens - 1 - WINDOW,
        "repaired_tokens": WINDOW,
    }
    layers, heads, head_dim = pair.source.spec.kv_shape
    assert body["kv_bytes_moved"] == 4 * 2 * layers * heads * head_dim * (tokens - WINDOW)
    assert body["object"] == "text_completion"
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_stream_says_the_same_in_pieces(pair: Pair) -> None:
    answered = ask(pair.pipeline(), max_tokens=12, stream=True)
    assert len(answered) == 13
    assert text_of(answered) == pair.mapped(PROMPT, 12)
    assert {each.body["kv_status"] for each in answered} == {"applied"}
    assert [each.last is None for each in answered] == [True] * 12 + [False]
    assert [each.body["choices"][0]["finish_reason"] for each in answered[:-1]] == [None] * 12
    assert "usage" in answered[-1].body
    assert len({each.body["id"] for each in answered}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_the_work(pair: Pair, stream: bool) -> None:
    whole = pair.mapped(PROMPT, 12).split(" ")
    stop = f"{whole[4]} {whole[5]}"
    answered = ask(pair.pipeline(), max_tokens=12, stream=stream, stop=stop)
    assert text_of(answered) == " ".join(whole).partition(stop)[0]
    assert answered[-1].body["choices"][0]["finish_reason"] == "stop"
    assert answered[-1].body["usage"]["completion_tokens"] < 12


def test_an_end_token_ends_the_answer(pair: Pair, tmp_path: Path) -> None:
    whole = pair.mapped(PROMPT, 12).split(" ")
    end = whole[3]
    tokenizer = AutoTokenizer.from_pretrained(pair.target.model.name_or_path)
    tokenizer.eos_token = end
    answerer = TargetAnswerer(replace(pair.target, tokenizer=tokenizer), pair.path)
    (answered,) = ask(pair.pipeline(answer=answerer.answer), max_tokens=12)
    assert answered.body["usage"]["completion_tokens"] == whole.index(end) + 1
    assert answered.body["choices"][0]["finish_reason"] == "stop"
    assert end not in text_of([answered])


# --- Fail closed: the target's own answer, and why -----------------------------------------------


def refused(pair: Pair, pipeline: Pipeline, parameters: dict | None = None) -> str:
    """kv_status and reason of an answer that must be the target's own."""
    (answered,) = ask(pipeline, parameters, max_tokens=12)
    assert text_of([answered]) == pair.native(PROMPT, 12)
    assert answered.body["usage"]["mapped_tokens"] == 0
    return f"{answered.body['kv_status']} {answered.body['kv_reason']}"


def test_a_source_that_fails(pair: Pair) -> None:
    def read(token_ids: list[int], owner: tuple[str, str], judged: int) -> None:
        raise UnavailableError("gone")

    said = refused(pair, pair.pipeline(read=read))
    assert said == "fallback_reprefill source_failed: gone"


@pytest.mark.parametrize("broken", ["nan", "short", "shape", "length"])
def test_a_read_that_cannot_be_used(pair: Pair, broken: str) -> None:
    def read(token_ids: list[int], owner: tuple[str, str], judged: int) -> Any:
        whole = pair.reader.read(token_ids, owner, judged)
        kv = {
            "nan": torch.full_like(whole.kv, torch.nan),
            "short": whole.kv[:, :, :, :-5],
            "shape": whole.kv.transpose(1, 2),
            "length": whole.kv[0, 0, 0, 0],
        }
        return replace(whole, kv=kv[broken])

    said = refused(pair, pair.pipeline(read=read))
    assert said.startswith("fallback_reprefill hand_over_failed: ")


def test_a_read_of_another_prompt(pair: Pair) -> None:
    """Of as many tokens, so that nothing else about it is wrong: a late answer of the source."""

    def read(token_ids: list[int], owner: tuple[str, str], judged: int) -> Any:
        return pair.reader.read([*token_ids[:-2], token_ids[-1], token_ids[-2]], owner, judged)

    said = refused(pair, pair.pipeline(read=read))
    assert said.startswith(
        "fallback_reprefill hand_over_failed: The source sent the keys and values"
    )


def test_a_read_of_another_model(pair: Pair, random_model: Callable) -> None:
    stranger = SourceReader(random_model("llama", layers=3, kv_heads=4, seed=5))
    said = refused(pair, pair.pipeline(read=stranger.read))
    assert said.startswith("unsupported mismatch: The map was fitted for another source model")
    (answered,) = ask(pair.pipeline(), max_tokens=2)
    assert answered.body["kv_status"] == "applied", "the right source serves again"


def test_a_map_that_cannot_serve(pair: Pair, random_model: Callable, tmp_path: Path) -> None:
    unproven, damaged = tmp_path / "unproven", tmp_path / "damaged"
    random_map(pair.source, pair.target).save(unproven)
    damaged.write_bytes(pair.path.read_bytes()[:-9])
    other = tmp_path / "other"
    vouched(random_map(pair.source, random_model("qwen3", head_dim=32, seed=7))).save(other)
    for path, reason in (
        (unproven, "unproven"),
        (damaged, "unreadable_map"),
        (tmp_path / "none", "unreadable_map"),
        (other, "mismatch"),
    ):
        answerer = TargetAnswerer(pair.target, path)
        said = refused(pair, pair.pipeline(answer=answerer.answer))
        assert said.startswith(f"unsupported {reason}: "), said
    allowed = TargetAnswerer(pair.target, unproven, allow_unproven=True)
    assert KvMap.load(unproven, allow_unproven=True).evidence is None
    (answered,) = ask(pair.pipeline(answer=allowed.answer), max_tokens=2)
    assert answered.body["kv_status"] == "applied"


def test_a_map_that_the_client_did_not_mean(pair: Pair) -> None:
    said = refused(pair, pair.pipeline(), {"x-vsr-kv-mapper-id": "other-b1"})
    assert said.startswith("unsupported other_mapper: the map 'other-b1' was asked for, 'pair'")
    (answered,) = ask(pair.pipeline(), {"x-vsr-kv-mapper-id": "pair"}, max_tokens=2)
    assert answered.body["kv_status"] == "applied"


def test_a_prompt_too_short_to_map_asks_no_source(pair: Pair) -> None:
    def read(token_ids: list[int], owner: tuple[str, str], judged: int) -> None:
        raise AssertionError("asked")

    prompt = "<bos> after anna ben near old river stood near"
    (answered,) = ask(pair.pipeline(read=read), prompt=prompt, max_tokens=3)
    assert answered.body["kv_reason"].startswith("short_prompt: ")
    assert text_of([answered]) == pair.native(prompt, 3)


def test_a_policy_decides_who_reads(pair: Pair) -> None:
    seen = []

    def policy(request: Any, token_ids: list[int], plan: Any) -> Outcome:
        seen.append((request.tenant, len(token_ids), len(plan.mapped)))
        return Outcome("fallback_reprefill", "load", "the source is busy")

    said = refused(pair, pair.pipeline(policy=policy))
    assert said == "fallback_reprefill load: the source is busy"
    tokens = len(PROMPT.split())
    assert seen == [("", tokens, tokens - 1 - WINDOW)]


# --- The guard -----------------------------------------------------------------------------------


def guarded(pair: Pair, path: Path, limit: float) -> TargetAnswerer:
    """Answers from the pair's map with a guard that weighs the loss gap alone."""
    signals = 3 + 2 * pair.target.spec.num_layers  # three losses, and a drift a layer of so few
    guard = Guard((1.0,) + (0.0,) * (signals - 1), 0.0, limit, {})
    pair.kvmap.with_guard(guard.to_json()).save(path)
    return TargetAnswerer(pair.target, path)


def asking(pair: Pair, answerer: TargetAnswerer, **changed: Any) -> Pipeline:
    """The pipeline for a map that carries a guard."""
    pipeline = pair.pipeline(answer=answerer.answer, **changed)
    pipeline.config = replace(pipeline.config, guarded=True)
    return pipeline


def loss_gap(pair: Pair) -> float:
    """By hand: the target's loss on the known repaired tokens over the source's."""
    ids = pair.target.tokenise(PROMPT)
    bridge = KvBridge(pair.kvmap, source=pair.source, target=pair.target)
    read = prefill(pair.source, ids)
    plan = plan_handoff(len(ids), repair_window=WINDOW)
    made = bridge.hand_over(read.cache, ids, plan, keep_logits=WINDOW)
    known = torch.tensor(ids[-WINDOW + 1 :])
    target, source = (
        torch.log_softmax(logits[-WINDOW:-1].double(), -1)[range(WINDOW - 1), known].mean()
        for logits in (made.repaired_logits, read.logits)
    )
    return float(source - target)


def test_the_maps_guard_decides(pair: Pair, tmp_path: Path) -> None:
    gap = loss_gap(pair)
    stands = guarded(pair, tmp_path / "stands", gap + 0.001)
    (answered,) = ask(asking(pair, stands), max_tokens=12)
    assert text_of([answered]) == pair.mapped(PROMPT, 12)
    assert answered.body["kv_status"] == "applied"
    objects = guarded(pair, tmp_path / "objects", gap - 0.001)
    said = refused(pair, asking(pair, objects))
    figures = re.fullmatch(
        r"fallback_reprefill guard: it scores this hand-over (\S+), and (\S+) is its limit", said
    )
    assert figures is not None, said
    assert [float(f) for f in figures.groups()] == pytest.approx([gap, gap - 0.001], rel=0.01)


def test_a_guard_judges_a_later_turn_as_it_does_the_whole(pair: Pair, tmp_path: Path) -> None:
    """What the source holds already, it reads again as far as it is judged by."""
    gap = loss_gap(pair)
    for limit, status in ((gap + 0.001, "applied"), (gap - 0.001, "fallback_reprefill")):
        pipeline = asking(pair, guarded(pair, tmp_path / status, limit))
        ask(pipeline, prompt=" ".join(WORDS[:4]), max_tokens=1, conversation=status)
        for _ in range(2):
            (answered,) = ask(pipeline, max_tokens=2, conversation=status)
            assert answered.body["kv_status"] == status


def test_a_guard_that_cannot_judge_lets_nothing_pass(pair: Pair, tmp_path: Path) -> None:
    answerer = guarded(pair, tmp_path / "map", 1e9)
    said = refused(pair, pair.pipeline(answer=answerer.answer))
    assert said.startswith("fallback_reprefill not_judged: the map carries a guard")

    def read(token_ids: list[int], owner: tuple[str, str], judged: int) -> Any:
        whole = pair.reader.read(token_ids, owner, judged)
        return replace(whole, losses=whole.losses[1:])

    said = refused(pair, asking(pair, answerer, read=read))
    assert said.startswith("fallback_reprefill hand_over_failed: The source sent 6 losses")
    pair.kvmap.with_guard({"weights": "none"}).save(tmp_path / "damaged")
    damaged = TargetAnswerer(pair.target, tmp_path / "damaged")
    said = refused(pair, asking(pair, damaged))
    assert said.startswith("unsupported unreadable_map: The guard in the map cannot be read")


# --- Routing by measured speeds ------------------------------------------------------------------

# At 61 tokens of which 8 are repaired, in seconds: the target reads them in 0.061, the map takes
# 0.01 + 53/10000 = 0.0153, and the source another 0.053 for what it has not read.
SPEEDS = Speeds(
    source_prefill=Timing(((1000, 1.0),)),
    target_prefill=Timing(((1000, 1.0),)),
    map=Timing(((1000, 0.1),)),
    repair=Timing(((1, 0.01), (1000, 0.01))),
    repair_window=WINDOW,
    source_decode=100.0,
    target_decode=25.0,
)


def vouching(**changed: Any) -> dict[str, Any]:
    """A report for hand-overs like these."""
    found = report(**changed)
    return found | {"config": found["config"] | {"N": WINDOW}}


def routing(pair: Pair, known: Any = None, **changed: Any) -> Routed:
    spec = replace(pair.target.spec, max_positions=512)
    header = MapHeader(pair.source.spec, spec, known or vouching(), DIGEST, guarded=False)
    return Routed(replace(SPEEDS, **changed), header, pair.reader.held)


def test_a_prompt_is_read_by_whoever_is_sooner(pair: Pair) -> None:
    assert len(PROMPT.split()) == 61
    pipeline = pair.pipeline(policy=routing(pair))
    said = refused(pair, pipeline)
    assert said == (
        "fallback_reprefill reading_is_faster: reading again is faster at 61 tokens: 0.061 s, "
        "0.0683 s by mapping (no length breaks even)"
    )
    quicker = pair.pipeline(policy=routing(pair, source_prefill=Timing(((1000, 0.8),))))
    (answered,) = ask(quicker, max_tokens=12)
    assert text_of([answered]) == pair.mapped(PROMPT, 12)
    assert answered.body["kv_status"] == "applied"


def test_the_break_even_is_told(pair: Pair) -> None:
    """n/1000 > 0.04 + (n - 8)(0.0001 + 0.0005)  <=>  n > 88."""
    slow = routing(
        pair,
        source_prefill=Timing(((1000, 0.5),)),
        repair=Timing(((1, 0.04), (1000, 0.04))),
    )
    assert refused(pair, pair.pipeline(policy=slow)).endswith("(break-even 89)")


def test_what_the_source_holds_of_a_conversation_is_not_read_again(pair: Pair) -> None:
    """40 tokens held leave 13 to read: 0.0283 s."""
    pair.reader.read(pair.source.tokenise(PROMPT)[:40], ("t", "known"))
    pipeline = pair.pipeline(policy=routing(pair))
    known = {"tenant": "t", "conversation": "known", "max_tokens": 2}
    (answered,) = ask(pipeline, **known)
    assert answered.body["kv_status"] == "applied"
    for other in ({"tenant": "u"}, {"conversation": "new"}):
        (answered,) = ask(pipeline, **{**known, **other})
        assert answered.body["kv_status"] == "fallback_reprefill"
    held = routing(pair, map=Timing(((1000, 2.0),)))
    (answered,) = ask(pair.pipeline(policy=held), **known)
    assert "at 61 tokens (53 held by the source): " in answered.body["kv_reason"]


def test_a_map_that_its_evidence_does_not_vouch_for_is_not_used(pair: Pair) -> None:
    doubtful = vouching(perplexity_ratio={"value": 1.3, "low": 1.2, "high": 1.4})
    quick = routing(pair, doubtful, source_prefill=Timing(((1000, 0.01),)))
    said = refused(pair, pair.pipeline(policy=quick))
    refusal = "fallback_reprefill not_vouched: the map may not be used: its"
    assert said.startswith(f"{refusal} report")
    copied = replace(quick, header=replace(quick.header, evidence=vouching(), map_digest="0f" * 32))
    said = refused(pair, pair.pipeline(policy=copied))
    assert said.startswith(f"{refusal} evidence is of another map")


def test_speeds_of_another_repair_window_are_not_routed_by(pair: Pair, tmp_path: Path) -> None:
    """The evidence is asked about the window of the speeds, so another one would pass unasked."""
    route = routing(pair)
    SPEEDS.save(tmp_path / "speeds.json")
    loaded = Routed.load(tmp_path / "speeds.json", route.header, WINDOW, route.held)
    assert loaded == route
    with pytest.raises(InputError, match=f"window of {WINDOW} tokens.*hands over with 4"):
        Routed.load(tmp_path / "speeds.json", route.header, 4, route.held)


def test_a_source_that_cannot_be_asked_what_it_holds_has_failed(pair: Pair) -> None:
    def held(token_ids: list[int], owner: tuple[str, str]) -> int:
        raise UnavailableError("gone")

    policy = replace(routing(pair), held=held)
    (answered,) = ask(pair.pipeline(policy=policy), conversation="c", max_tokens=2)
    assert answered.body["kv_reason"] == "source_failed: gone"


def test_a_header_says_what_the_map_does(pair: Pair, tmp_path: Path) -> None:
    plain = MapHeader.read(pair.path)
    assert (plain.source, plain.target) == (pair.source.spec, pair.target.spec)
    assert (plain.evidence, plain.guarded) == (pair.kvmap.evidence, False)
    assert plain.map_digest == pair.kvmap.map_digest()
    pair.kvmap.with_guard({"limit": 1}).save(tmp_path / "guarded")
    guarded = MapHeader.read(tmp_path / "guarded")
    assert (guarded.guarded, guarded.recalling) == (True, False)
    pair.kvmap.with_guard({"limit": 1, "recalling": {"limit": 2}}).save(tmp_path / "recalling")
    assert MapHeader.read(tmp_path / "recalling").recalling
    pair.path.with_name("text").write_text("no map")
    with pytest.raises(FormatError, match="not a whole safetensors file"):
        MapHeader.read(pair.path.with_name("text"))


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "<bos> not-a-word"}, "cannot write"),
        ({"max_tokens": 500}, "500 more are asked for; the target allows 512"),
        ({"prompt": " ".join(["anna"] * 512)}, "has 512 tokens and 1 more"),
        ({"prompt": None, "messages": [{"role": "user", "content": "a"}]}, "no chat template"),
        ({"foo": 1}, "Unknown field"),
        ({"tenant": "t" * 300}, "at most 256 characters"),
    ],
)
def test_a_bad_request_is_a_sentence_before_any_model_runs(
    pair: Pair, body: dict[str, Any], said: str
) -> None:
    def never(*_: object) -> Iterator[Event]:
        raise AssertionError("asked")

    with pytest.raises(InputError, match=said):
        ask(pair.pipeline(read=never, answer=never), **body)


def test_what_is_far_too_long_is_not_even_parsed(pair: Pair) -> None:
    most = 64 * 512
    with pytest.raises(InputError, match=f"has {most + 1} characters; at most {most} are read"):
        next(pair.pipeline().respond("{" * (most + 1), {}))
    with pytest.raises(InputError, match="not JSON"):
        next(pair.pipeline().respond("{" * most, {}))


def test_a_model_of_whole_answers_gives_no_stream(pair: Pair) -> None:
    pipeline = pair.pipeline()
    pipeline.config = replace(pipeline.config, streams=False)
    with pytest.raises(InputError, match="`stream` must be false"):
        ask(pipeline, stream=True)
    assert len(ask(pipeline, max_tokens=2)) == 1


def test_messages_go_through_the_chat_template(pair: Pair, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair.target.model.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}<bos> {{ m.content }} {% endfor %}so"
    )
    pipeline = Pipeline(
        pair.pipeline().config, tokenizer, read=pair.reader.read, answer=pair.answerer.answer
    )
    said = [{"role": "user", "content": PROMPT.removeprefix("<bos> ")}]
    for stream, where in ((False, "message"), (True, "delta")):
        answered = ask(pipeline, prompt=None, messages=said, max_tokens=5, stream=stream)
        pieces = [each.body["choices"][0][where]["content"] for each in answered]
        assert "".join(pieces) == pair.mapped(f"{PROMPT} so", 5)
        assert answered[0].body["object"].startswith("chat.completion")
    with pytest.raises(InputError, match="no tools"):
        ask(pipeline, prompt=None, messages=[{"role": "tool", "content": "x"}])


# --- What the source holds -----------------------------------------------------------------------


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(pair: Pair) -> None:
    reader = SourceReader(pair.source, max_held_tokens=100)
    ids = pair.source.tokenise(PROMPT)
    owner = ("tenant", "conversation")
    first, second = reader.read(ids[:30], owner), reader.read(ids[:45], owner)
    assert (first.tokens_read, second.tokens_read) == (30, 15)
    fresh = SourceReader(pair.source).read(ids[:45])
    assert fresh.tokens_read == 45
    torch.testing.assert_close(second.kv, fresh.kv, rtol=0, atol=2e-5)
    assert reader.read(ids[:45], ("other", "conversation")).tokens_read == 45
    assert reader.read([*ids[:20], ids[0]], owner).tokens_read == 1, "only what is alike"


def test_what_is_held_has_a_bound_and_the_longest_unused_goes_first(pair: Pair) -> None:
    reader = SourceReader(pair.source, max_held_tokens=100)
    ids = pair.source.tokenise(PROMPT)
    for name in ("a", "b", "c"):
        reader.read(ids[:40], ("", name))
        reader.read(ids[:1], ("", "a"))  # it says less than what is held, and keeps it in use
    assert reader.held_tokens == 80
    assert [reader.read(ids[:40], ("", name)).tokens_read for name in "cab"] == [0, 0, 40]
    again = [reader.read(ids[:40], ("tenant", "")).tokens_read for _ in range(2)]
    assert again == [40, 40], "without a conversation nothing is kept"
    assert reader.held_tokens <= 100
    assert SourceReader(pair.source).read(ids[:9], ("", "a")).tokens_read == 9


# --- What crosses a process, and what is counted -------------------------------------------------


def test_jobs_and_events_survive_json() -> None:
    why = Outcome("fallback_reprefill", "load", "busy")
    for job in (Job(3), Job(3, ("a", "b"), True, 4, 5, why, "talk")):
        assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    last = Event("b", why, "stop", {"prompt": 1}, {"map": 0.5}, 7, "queued")
    for event in (Event("a", why), last):
        assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


def test_every_answer_is_counted_once() -> None:
    counted: dict[tuple[str, str], float] = {}

    class Counter:
        def __init__(self, name: str, labels: dict[str, str]) -> None:
            self.key = name, ",".join(labels.values())
            counted[self.key] = 0

        def increment(self, value: float) -> None:
            counted[self.key] += value

    counters = Counters(lambda name, text: lambda labels: Counter(name, labels))
    counts = {"prompt": 50, "completion": 3, "mapped": 41, "repaired": 8}
    for _ in range(2):
        counters.count(
            Event("", Outcome("applied"), "length", counts, {"map": 2.0, "repair": 1.5}, 10)
        )
    own = {"prompt": 50, "completion": 3, "mapped": 0, "repaired": 0}
    unproven = Outcome("unsupported", "unproven")
    counters.count(Event("", unproven, "stop", own, {"first_token": 9}, traffic="not_mapped"))
    counters.count_error()
    zero = {key: value for key, value in counted.items() if not value}
    assert zero == {("kvmap_requests_total", "fallback_reprefill"): 0}
    assert {key: value for key, value in counted.items() if value} == {
        ("kvmap_requests_total", "applied"): 2,
        ("kvmap_requests_total", "unsupported"): 1,
        ("kvmap_fallbacks_total", "unproven"): 1,
        ("kvmap_traffic_total", "not_mapped"): 1,
        ("kvmap_map_ms_total", ""): 4.0,
        ("kvmap_repair_ms_total", ""): 3.0,
        ("kvmap_tokens_prompt_total", ""): 150,
        ("kvmap_tokens_completion_total", ""): 9,
        ("kvmap_tokens_mapped_total", ""): 82,
        ("kvmap_tokens_repaired_total", ""): 16,
        ("kvmap_bytes_moved_total", ""): 20,
        ("kvmap_errors_total", ""): 1,
    }
    assert {name for name, _ in counted} == set(ALL)
