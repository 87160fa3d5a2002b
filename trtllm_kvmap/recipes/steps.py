"""The steps that recipes share: moments, a chosen map, a judged map, and figures of ratios."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.gates import Gates
from trtllm_kvmap.evaluate.run import EvaluationConfig, evaluate
from trtllm_kvmap.evaluate.select import select
from trtllm_kvmap.fit import FitConfig
from trtllm_kvmap.recipes.outcome import Judged, Row
from trtllm_kvmap.recipes.pair import Pair

Progress = Callable[[str, int, int], None]
RESAMPLES = 2000


def moments_of(pair: Pair, calibration: CalibrationConfig, on_progress: Progress) -> MomentSet:
    """Moments of the documents that fit. Where rows are weighed, by what the target makes of each
    document when it reads its last quarter (see calibrate).
    """
    with tempfile.TemporaryDirectory() as folder:
        return calibrate(
            pair.source,
            pair.target,
            pair.documents,
            calibration,
            Path(folder) / "moments.safetensors",
            on_document=lambda done, total: on_progress(_named("calibrate", pair), done, total),
        )


def chosen(
    pair: Pair,
    moments: MomentSet,
    candidates: Sequence[FitConfig],
    judged: EvaluationConfig,
    on_progress: Progress,
) -> tuple[KvMap, list[Row]]:
    """The candidate with the lowest loss on the selection items, and the table of all."""
    kvmap, table = select(
        moments,
        candidates,
        pair.source,
        pair.target,
        pair.selection,
        judged,
        on_candidate=lambda done, total: on_progress(_named("choose", pair), done, total),
    )
    rows = []
    for entry in table:
        fit = entry["config"]
        told = {name: fit[name] for name in ("scope", "k", "ridge", "rank")}
        figures = {"parameters": "parameters", "cosine": "attention_cosine"}
        figures |= {"NLL": "nll", "accuracy": "accuracy", "chosen": "chosen"}
        rows.append({**told, **{shown: entry[key] for shown, key in figures.items()}})
    return kvmap, rows


def judged_map(
    pair: Pair,
    kvmap: KvMap,
    config: EvaluationConfig,
    on_progress: Progress,
    gates: Gates | None = None,
) -> Judged:
    report = evaluate(
        kvmap,
        pair.source,
        pair.target,
        pair.report,
        config,
        on_item=lambda done, total: on_progress(_named("judge", pair), done, total),
        gates=gates or Gates(),
        task=pair.task,
    )
    return Judged(kvmap, report)


def ratio_figure(
    above: Sequence[float] | np.ndarray, below: Sequence[float] | np.ndarray
) -> dict[str, float | None]:
    """sum(above) / sum(below) over the same cases, with its paired interval."""
    counts = draw(len(above), RESAMPLES, 0)
    bottom = counts @ np.asarray(below)
    quotient = np.divide(
        counts @ np.asarray(above), bottom, out=np.full(len(bottom), np.nan), where=bottom != 0
    )
    return figure(quotient).to_json()


def mean_figure(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """The mean over cases, with its interval."""
    return ratio_figure(values, [1.0] * len(values))


def said(entry: dict[str, Any]) -> str:
    """``0.71 [0.64, 0.78]``, for a sentence."""
    if entry["value"] is None:
        return "not to be told"
    if entry["low"] is None or entry["high"] is None:
        return f"{entry['value']:.2f}"
    return f"{entry['value']:.2f} [{entry['low']:.2f}, {entry['high']:.2f}]"


def arm_rows(judged: Judged, arms: dict[str, str], figures: dict[str, str]) -> list[Row]:
    """One row for each of ``arms`` (shown name: arm of the report), with ``figures`` (shown name:
    figure); an arm that was refused has none.
    """
    found = judged.report.arms
    return [
        {"arm": name, **{shown: found[arm].get(key) for shown, key in figures.items()}}
        for name, arm in arms.items()
    ]


def _named(stage: str, pair: Pair) -> str:
    return f"{pair.source.name} to {pair.target.name}: {stage}"
