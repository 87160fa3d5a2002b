"""Which fit recovers most, at one operating point, on documents that chose nothing (run it through
bench.py fits).

Every way of fitting reads the same calibration documents, which look like those of the report. Its
candidates are compared on selection documents by the target's own loss; the winner of each is then
judged on the report's documents, all with the same S and N, beside tuned plain ridge.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fit_failing import failing
from fit_own_layers import own_layers_curve
from fit_pair import JUDGED, PLAN, Bench
from fit_position_bias import position_bias_curve
from fit_predictors import predictors
from fit_ranks import low_ranks
from fit_shared import shared_correction_curve
from fit_storage import storage
from fit_time import qwen3_fit_time
from fit_ways import BASELINE, PLAIN, WAYS, WEIGHTINGS

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.demo import asked, tiny_items
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.tiny import PAIRS, model_folder

CALIBRATION_SEED = 11
CALIBRATION_ITEMS = 60


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
        "storage": storage(bench),
        "predictors": predictors(bench),
        "position_bias": _position_bias(bench),
    }
    if source.spec.num_kv_heads == target.spec.num_kv_heads:
        result["failing"] = failing(bench)
        result["own_layers"] = _own_layers(bench)
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


def _position_bias(bench: Bench) -> list[dict[str, Any]]:
    """Plain ridge with a bias for each stretch of positions behind it."""
    kvmap = bench.best("uniform", PLAIN)

    def figures(bridge: KvBridge) -> dict[str, Any]:
        chosen = bench.handed_over(bridge, "selection")
        judged = bench.figures(bench.handed_over(bridge, "report"))
        return {"selection_nll": float(chosen.nll[0]), **judged}

    return position_bias_curve(kvmap, bench.source, bench.target, bench.texts, figures)


def _own_layers(bench: Bench) -> list[dict[str, Any]]:
    """Plain `slice` ridge with m of the target's own layers among what it may read."""
    return own_layers_curve(
        bench.source,
        bench.target,
        bench.texts,
        bench.readings["report"],
        lambda ready: bench.figures(bench.draws(ready, "report")),
        PLAN,
    )
