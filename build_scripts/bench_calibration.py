"""How a map's quality grows with the number of calibration sequences, and what counting a server's
own traffic gains (run it through bench.py calibration).

Growth: the same fit from the moments of the first 10, 50, 100 and 500 sequences. Traffic: a map of
ten documents unlike what the server reads; that is counted, the map refitted from it alone and
tried on what was held out. Delay: an answer while prompts wait to be counted, over the same answer
while none does, turn by turn; and what it would be if counting did not stand still.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.demo import REPORT_SEED
from trtllm_kvmap.evaluate.arms import mapped
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.probe import Ready
from trtllm_kvmap.evaluate.promote import promote, refit
from trtllm_kvmap.evaluate.reading import Reading, judge, read_item
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.evaluate.summary import Draws, gap
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import PAIRS, model_folder
from trtllm_kvmap.tiny.documents import make_document, mostly_facts

SEQUENCES = (10, 50, 100, 500)
REPORT_ITEMS, CONTEXT_TOKENS, SCALE_SEED, TRAFFIC_SEED = 40, 512, 41, 42
JUDGED = EvaluationConfig(first_tokens=4, repair_window=32)
JOINT = CalibrationConfig(joint=True)
FITTED = FitConfig(scope="slice", n=8, fields="both", ridge=1e-4)
TRAFFIC, TRAFFIC_TOKENS, TRAFFIC_FACTS = 120, 320, 20  # prompts that the server reads
TURNS, WAITING, LONG, REPLY = 25, 6, 1000, 8  # answers timed; prompts waiting, their tokens


def bench_calibration() -> dict[str, Any]:
    return {
        "operating_point": {"S": JUDGED.first_tokens, "N": JUDGED.repair_window},
        "fit": {"scope": FITTED.scope, "n": FITTED.n, "ridge": FITTED.ridge, "fields": "both"},
        "pairs": {"-".join(pair): _pair(*pair) for pair in PAIRS},
    }


def _pair(source_name: str, target_name: str) -> dict[str, Any]:
    source, target = (load_model(model_folder(name)) for name in (source_name, target_name))
    config = TaskConfig(num_items=REPORT_ITEMS, seed=REPORT_SEED, context_tokens=CONTEXT_TOKENS)
    items = read_items(config, target.tokenizer)
    readings = [read_item(source, target, item, (), rollout_steps=1) for item in items]
    alone = {
        "source": _draws([reading.source for reading in readings], readings),
        "target": _draws([reading.target for reading in readings], readings),
    }
    documents = [target.tokenise(text) for text in mostly_facts(SCALE_SEED, max(SEQUENCES))]
    growth, moments = [], None
    for start, stop in zip((0, *SEQUENCES), SEQUENCES, strict=False):
        more = _calibrated(source, target, documents[start:stop])
        moments = more if moments is None else moments + more
        kvmap = fit(moments, FITTED)
        growth.append(
            {"sequences": stop, "tokens": moments.record["tokens"]}
            | _figures(kvmap, source, target, readings, alone)
        )
        print(f"{source_name} to {target_name}: {growth[-1]}", flush=True)
    return {
        "growth": growth,
        "traffic": _traffic(source, target),
        "delay": {
            name: _delay(source, target, kvmap, counting)
            for name, counting in (("standing_still", TrafficMoments), ("going_on", _Heedless))
        },
    }


def _calibrated(
    source: LoadedModel, target: LoadedModel, documents: Sequence[Sequence[int]]
) -> MomentSet:
    with tempfile.TemporaryDirectory() as folder:
        return calibrate(source, target, documents, JOINT, Path(folder) / "moments")


def _figures(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    readings: Sequence[Reading],
    alone: dict[str, Draws],
) -> dict[str, Any]:
    """The mapped target's figures beside those of the two models alone."""
    bridge = KvBridge(kvmap, source=source, target=target)
    plan = {"first_tokens": JUDGED.first_tokens, "repair_window": JUDGED.repair_window}
    ready = [mapped(bridge, lambda count: plan_handoff(count, **plan), r) for r in readings]
    draws = {**alone, "mapped": _draws(ready, readings)}
    recovered = gap(draws["mapped"], draws["source"], draws["target"], "accuracy")
    return {
        **{f"{name}_accuracy": figure(each.accuracy).to_json() for name, each in draws.items()},
        "nll": figure(draws["mapped"].nll).to_json(),
        "gap_recovered": figure(recovered).to_json(),
        "r2_key": kvmap.fitted["r2"]["key"]["mean"],
        "r2_value": kvmap.fitted["r2"]["value"]["mean"],
    }


def _draws(ready: Sequence[Ready], readings: Sequence[Reading]) -> Draws:
    outcomes = [
        judge(each, reading, length_normalised=False)
        for each, reading in zip(ready, readings, strict=True)
    ]
    counts = draw(len(readings), JUDGED.resamples, 0)
    return Draws([outcome.score for outcome in outcomes], counts)


def _traffic(source: LoadedModel, target: LoadedModel) -> dict[str, Any]:
    """An old map of ten documents unlike the traffic against one refitted from the traffic."""
    few = [target.tokenise(text) for text in mostly_facts(seed=1, count=10)]
    old = fit(_calibrated(source, target, few), FITTED)
    rng = np.random.default_rng(TRAFFIC_SEED)
    config = TrafficConfig(consent=True, max_pending=TRAFFIC)
    # Which prompts are held out is a secret of every run; here it is no secret, so that two runs
    # agree.
    with patch.object(secrets, "token_bytes", bytes):
        traffic = TrafficMoments(source, target, config, JOINT)
    with traffic:
        for _ in range(TRAFFIC):
            text = make_document(rng, TRAFFIC_TOKENS, TRAFFIC_FACTS, 0).text
            traffic.offer(target.tokenise(text))
        traffic.drain()
        began = time.perf_counter()
        new = refit(old, traffic.moments())
        refitted = time.perf_counter() - began
        served, trial = promote(old, new, source, target, traffic.held_out(), JUDGED)
        return {
            "counted": traffic.documents,
            "held_out": len(traffic.held_out()),
            "refit_seconds": refitted,
            "promoted": served is not old,
            "gain": trial.gain,
            "nll": trial.nll,
            "gap_recovered": trial.gap_recovered,
        }


class _Heedless(TrafficMoments):
    """Counts on while an answer is made."""

    @contextmanager
    def answering(self) -> Iterator[None]:
        yield


def _delay(
    source: LoadedModel, target: LoadedModel, kvmap: KvMap, counting: type[TrafficMoments]
) -> dict[str, float]:
    """A hand-over and REPLY tokens with prompts waiting, over the same with none, in one turn."""
    bridge, rng = KvBridge(kvmap, source=source, target=target), np.random.default_rng(TRAFFIC_SEED)
    documents = (
        target.tokenise(make_document(rng, LONG, TRAFFIC_FACTS, 0).text)
        for _ in range(1 + TURNS * WAITING)
    )
    prompt = next(documents)

    def answer(traffic: TrafficMoments) -> float:
        session = Session({"source": source, "target": target}, [bridge], traffic=traffic)
        session.add(prompt)
        began = time.perf_counter()
        session.switch("target")
        session.generate(REPLY)
        return time.perf_counter() - began

    ratios = []
    with counting(source, target, TrafficConfig(True, held_out_every=10**9)) as traffic:
        for turn in range(TURNS):
            traffic.drain()
            alone = answer(traffic)
            for _ in range(WAITING):
                traffic.offer(next(documents))
            time.sleep(turn % 5 / 100)  # at different moments of a reading
            ratios.append(answer(traffic) / alone)
    return {"median": float(np.median(ratios)), "most": max(ratios)}
