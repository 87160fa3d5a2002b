"""Which fit recovers most, at one operating point, on documents that chose nothing (run it through
bench.py fits).

Every way of fitting reads the same calibration documents, which look like those of the report. Its
candidates are compared on selection documents by the target's own loss; the winner of each is then
judged on the report's documents, all with the same S and N, beside tuned plain ridge.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fit_own_layers import own_layers_curve
from fit_position_bias import position_bias_curve
from fit_ranks import low_ranks
from fit_shared import shared_correction_curve
from fit_time import qwen3_fit_time

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.demo import REPORT_SEED, SELECTION_SEED, asked, tiny_items
from trtllm_kvmap.evaluate.arms import mapped
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.reading import Reading, judge, read_item
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.evaluate.select import select
from trtllm_kvmap.evaluate.summary import Draws, gap
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.run import refine
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import PAIRS, model_folder

CALIBRATION_SEED = 11
CALIBRATION_ITEMS, SELECTION_ITEMS, REPORT_ITEMS = 60, 24, 60
JUDGED = EvaluationConfig(first_tokens=4, repair_window=32)
RIDGES = (1e-6, 1e-4, 1e-2)
PLAIN = (
    FitGrid(scope=("head", "pooled"), k=(1, 2, 3), ridge=RIDGES),
    FitGrid(scope=("slice",), n=(4, 8), ridge=RIDGES, own_slices=False),
)
OWN = (FitGrid(scope=("slice",), n=(4, 8), ridge=RIDGES),)
BOTH = (FitGrid(scope=("slice",), n=(8, 12, 16), ridge=RIDGES, fields="both"),)
MLP = RefineConfig("mlp", hidden=256, steps=300)
RESIDUAL = RefineConfig("residual", steps=80, learning_rate=1e-3)
WEIGHTINGS = "uniform", "sensitivity", "attention"


@dataclass(frozen=True)
class Way:
    """One way of fitting: which moments, which candidates, and what is trained beside the best."""

    weighting: str
    grids: tuple[FitGrid, ...]
    refinement: RefineConfig | None = None


WAYS = {
    "plain ridge": Way("uniform", PLAIN),
    "own layer 0": Way("uniform", OWN),
    "keys and values": Way("uniform", BOTH),
    "by sensitivity": Way("sensitivity", PLAIN),
    "by sensitivity, keys and values": Way("sensitivity", BOTH),
    "by attention": Way("attention", PLAIN),
    "by attention, keys and values": Way("attention", BOTH),
    "plain ridge + residual": Way("uniform", PLAIN, RESIDUAL),
    "plain ridge + mlp": Way("uniform", PLAIN, MLP),
    "by sensitivity, keys and values + mlp": Way("sensitivity", BOTH, MLP),
    "by attention, keys and values + mlp": Way("attention", BOTH, MLP),
}
BASELINE = "plain ridge"
# Head-local ridge is the cheapest map, and fails on the first pair: less than the source alone.
FAILING = FitGrid(scope=("head",), k=(1, 2, 3), ridge=RIDGES)


def bench_fits() -> dict[str, Any]:
    pairs = {"-".join(pair): _pair(*pair) for pair in PAIRS}
    return {
        "operating_point": {"S": JUDGED.first_tokens, "N": JUDGED.repair_window},
        "pairs": pairs,
        "qwen3_14b_to_32b": qwen3_fit_time(),
    }


def _pair(source_name: str, target_name: str) -> dict[str, Any]:
    source, target = (load_model(model_folder(name)) for name in (source_name, target_name))
    texts = tiny_items(target, CALIBRATION_ITEMS, CALIBRATION_SEED)
    moments = {weighting: _moments(source, target, texts, weighting) for weighting in WEIGHTINGS}
    bench = Bench(source, target, moments, texts)
    rows: dict[str, dict[str, Any]] = {}
    for name, way in WAYS.items():
        rows[name] = bench.row(way)
        print(f"{source_name} to {target_name}, {name}: {rows[name]['gap_recovered']}", flush=True)
    best = min(rows, key=lambda name: rows[name]["selection_nll"])
    for row in rows.values():
        row["gain"] = bench.gain(row["draws"], rows[BASELINE]["draws"])
    for row in rows.values():
        del row["draws"]
    result = {
        "baseline": BASELINE,
        "best": best,
        "gain": rows[best]["gain"],
        "table": rows,
        "ranks": low_ranks(bench, moments["attention"]),
        "storage": bench.storage(),
        "predictors": bench.predictors(),
        "position_bias": bench.position_bias(),
    }
    if source.spec.num_kv_heads == target.spec.num_kv_heads:
        result["failing"] = bench.failing()
        result["own_layers"] = bench.own_layers()
        result["shared_correction"] = shared_correction_curve(
            moments["attention"], lambda kvmap: bench.figures(bench.judged(kvmap, "report"))
        )
    return result


def _moments(
    source: LoadedModel, target: LoadedModel, items: Sequence[Item], weighting: str
) -> MomentSet:
    config = CalibrationConfig(joint=True, max_tokens=2048, weighting=weighting)
    with tempfile.TemporaryDirectory() as folder:
        return calibrate(
            source,
            target,
            [item.context for item in items],
            config,
            Path(folder) / "moments",
            continuations=None if weighting == "uniform" else [asked(item) for item in items],
        )


class Bench:
    """One pair: its moments, and its readings for choosing and for the report."""

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        moments: dict[str, MomentSet],
        texts: Sequence[Item],
    ) -> None:
        self.source, self.target, self.moments, self.texts = source, target, moments, texts
        self.chosen_on = tiny_items(target, SELECTION_ITEMS, SELECTION_SEED)
        self.candidates: list[dict[str, Any]] = []
        self.readings = {
            "selection": self._read(self.chosen_on),
            "report": self._read(tiny_items(target, REPORT_ITEMS, REPORT_SEED)),
        }
        self.counts = draw(REPORT_ITEMS, JUDGED.resamples, 0)
        self.alone = {
            name: self._draws([getattr(r, name) for r in self.readings["report"]], "report")
            for name in ("source", "target")
        }
        self._best: dict[tuple[str, tuple[FitGrid, ...]], KvMap] = {}

    def best(self, weighting: str, grids: tuple[FitGrid, ...]) -> KvMap:
        """The candidate with the lowest loss of the target on the selection documents."""
        key = weighting, grids
        if key not in self._best:
            self._best[key], table = select(
                self.moments[weighting],
                [config for grid in grids for config in grid.candidates()],
                self.source,
                self.target,
                self.chosen_on,
                JUDGED,
            )
            self.candidates += [row for row in table if row["refused"] is None]
        return self._best[key]

    def row(self, way: Way) -> dict[str, Any]:
        kvmap = self.best(way.weighting, way.grids)
        if way.refinement is not None:
            kvmap = self.refined(kvmap, way.refinement)
        chosen = self.judged(kvmap, "selection")
        judged = self.judged(kvmap, "report")
        return {
            "config": kvmap.fitted["config"],
            "refined": kvmap.fitted.get("refined", {}).get("scale"),
            "parameters": kvmap.num_parameters,
            "selection_nll": float(chosen.nll[0]),
            **self.figures(judged),
            "draws": judged,
        }

    def refined(self, kvmap: KvMap, config: RefineConfig) -> KvMap:
        documents = [item.context for item in self.texts]
        questions = [asked(item) for item in self.texts] if config.term == "residual" else None
        return refine(kvmap, self.source, self.target, documents, config, continuations=questions)

    def judged(self, kvmap: KvMap, split: str) -> Draws:
        return self.handed_over(KvBridge(kvmap, source=self.source, target=self.target), split)

    def handed_over(self, bridge: KvBridge, split: str) -> Draws:
        plan = {"first_tokens": JUDGED.first_tokens, "repair_window": JUDGED.repair_window}
        ready = [
            mapped(bridge, lambda count: plan_handoff(count, **plan), reading)
            for reading in self.readings[split]
        ]
        return self._draws(ready, split)

    def figures(self, judged: Draws) -> dict[str, Any]:
        """Accuracy of the mapped target beside the source's and the target's own."""
        return {
            "accuracy": figure(judged.accuracy).to_json(),
            "source_accuracy": figure(self.alone["source"].accuracy).to_json(),
            "target_accuracy": figure(self.alone["target"].accuracy).to_json(),
            "nll": figure(judged.nll).to_json(),
            "gap_recovered": figure(self._gap(judged)).to_json(),
        }

    def gain(self, judged: Draws, baseline: Draws) -> dict[str, Any]:
        """Gap recovered beyond the baseline's, paired over documents."""
        return figure(self._gap(judged) - self._gap(baseline)).to_json()

    def storage(self) -> list[dict[str, Any]]:
        """What rounding the weights costs the best matrices."""
        config = FitConfig(**self.best("sensitivity", BOTH).fitted["config"])
        rows = []
        for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn"):
            kvmap = fit(self.moments["sensitivity"], replace(config, dtype=dtype))
            judged = self.judged(kvmap, "report")
            rows.append({"dtype": dtype, **self.figures(judged)})
        return rows

    def predictors(self) -> dict[str, float]:
        """Spearman's rank correlation with gap recovered, over all candidates compared."""
        gaps = [row["gap_recovered"] for row in self.candidates]
        found = {"candidates": float(len(gaps))}
        for name, sign in (("r2_key", 1), ("r2_value", 1), ("attention_cosine", 1), ("nll", -1)):
            found[name] = _spearman([sign * row[name] for row in self.candidates], gaps)
        return found

    def failing(self) -> dict[str, Any]:
        """A map that ridge fails on, and what an MLP over the same slices recovers of the loss:
        of what lies between the ridge and the target itself.
        """
        ridge = self.best("uniform", (FAILING,))
        both = {"ridge": ridge, "mlp": self.refined(ridge, MLP)}
        judged = {name: self.judged(kvmap, "report") for name, kvmap in both.items()}
        gaps = {name: self._gap(each) for name, each in judged.items()}
        share = (gaps["mlp"] - gaps["ridge"]) / (1 - gaps["ridge"])
        return {
            "config": ridge.fitted["config"],
            **{name: self.figures(each) for name, each in judged.items()},
            "recovered_of_what_ridge_loses": figure(share).to_json(),
        }

    def position_bias(self) -> list[dict[str, Any]]:
        """Plain ridge with a bias for each stretch of positions behind it."""
        kvmap = self.best("uniform", PLAIN)

        def figures(bridge: KvBridge) -> dict[str, Any]:
            chosen = self.handed_over(bridge, "selection")
            judged = self.figures(self.handed_over(bridge, "report"))
            return {"selection_nll": float(chosen.nll[0]), **judged}

        return position_bias_curve(kvmap, self.source, self.target, self.texts, figures)

    def own_layers(self) -> list[dict[str, Any]]:
        """Plain `slice` ridge with m of the target's own layers among what it may read."""
        plan = {"first_tokens": JUDGED.first_tokens, "repair_window": JUDGED.repair_window}
        return own_layers_curve(
            self.source,
            self.target,
            self.texts,
            self.readings["report"],
            lambda ready: self.figures(self._draws(ready, "report")),
            plan,
        )

    def _gap(self, judged: Draws) -> np.ndarray:
        return gap(judged, self.alone["source"], self.alone["target"], JUDGED.metric)

    def _read(self, items: Sequence[Item]) -> list[Reading]:
        return [read_item(self.source, self.target, item, (), rollout_steps=1) for item in items]

    def _draws(self, ready: Sequence[Any], split: str) -> Draws:
        readings = self.readings[split]
        outcomes = [
            judge(each, reading, length_normalised=False)
            for each, reading in zip(ready, readings, strict=True)
        ]
        counts = self.counts if split == "report" else np.ones((1, len(readings)), dtype=np.int64)
        return Draws([outcome.score for outcome in outcomes], counts)


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(each)) for each in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])
