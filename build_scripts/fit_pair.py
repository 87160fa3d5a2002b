"""A pair of models in bench.py fits: its moments, its readings, and how a map is judged on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fit_ways import Way

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.demo import REPORT_SEED, SELECTION_SEED, asked, tiny_items
from trtllm_kvmap.evaluate.arms import mapped
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.reading import Reading, judge, read_item
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.evaluate.select import select
from trtllm_kvmap.evaluate.summary import Draws, gap
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.run import refine
from trtllm_kvmap.spec.plan import plan_handoff

SELECTION_ITEMS, REPORT_ITEMS = 24, 60
JUDGED = EvaluationConfig(first_tokens=4, repair_window=32)
PLAN = {"first_tokens": JUDGED.first_tokens, "repair_window": JUDGED.repair_window}


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
            name: self.draws([getattr(r, name) for r in self.readings["report"]], "report")
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
        ready = [
            mapped(bridge, lambda count: plan_handoff(count, **PLAN), reading)
            for reading in self.readings[split]
        ]
        return self.draws(ready, split)

    def figures(self, judged: Draws) -> dict[str, Any]:
        """Accuracy of the mapped target beside the source's and the target's own."""
        return {
            "accuracy": figure(judged.accuracy).to_json(),
            "source_accuracy": figure(self.alone["source"].accuracy).to_json(),
            "target_accuracy": figure(self.alone["target"].accuracy).to_json(),
            "nll": figure(judged.nll).to_json(),
            "gap_recovered": figure(self.gap(judged)).to_json(),
        }

    def gain(self, judged: Draws, baseline: Draws) -> dict[str, Any]:
        """Gap recovered beyond the baseline's, paired over documents."""
        return figure(self.gap(judged) - self.gap(baseline)).to_json()

    def gap(self, judged: Draws) -> np.ndarray:
        return gap(judged, self.alone["source"], self.alone["target"], JUDGED.metric)

    def _read(self, items: Sequence[Item]) -> list[Reading]:
        return [read_item(self.source, self.target, item, (), rollout_steps=1) for item in items]

    def draws(self, ready: Sequence[Any], split: str) -> Draws:
        readings = self.readings[split]
        outcomes = [
            judge(each, reading, length_normalised=False)
            for each, reading in zip(ready, readings, strict=True)
        ]
        counts = self.counts if split == "report" else np.ones((1, len(readings)), dtype=np.int64)
        return Draws([outcome.score for outcome in outcomes], counts)
