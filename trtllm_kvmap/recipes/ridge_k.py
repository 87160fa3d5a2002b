"""Ridge whose k is chosen: how many source layers a target head reads, from candidates.

Fitted, chosen and judged on text that shares nothing, and held to gates that are declared before
anything runs: controls, retention, perplexity, next-token agreement.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trtllm_kvmap.evaluate.gates import PASS, Gates
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.recipes.outcome import Outcome
from trtllm_kvmap.recipes.pair import Pair, PairConfig
from trtllm_kvmap.recipes.steps import Progress, arm_rows, chosen, judged_map, moments_of, said


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PairConfig):
    candidates: FitGrid
    gates: Gates


def run(config: Config, pair: Pair, on_progress: Progress) -> Outcome:
    moments = moments_of(pair, config.calibration, on_progress)
    candidates = config.candidates.candidates()
    kvmap, table = chosen(pair, moments, candidates, config.judged, on_progress)
    judged = judged_map(pair, kvmap, config.judged, on_progress, config.gates)
    report = judged.report
    arms = {
        "native target": "target",
        "native source": "source",
        "direct injection": "copy",
        "mapped": report.config["arm"],
    }
    figures = {
        "accuracy": "accuracy",
        "above chance": "retention_normalised",
        "gap recovered": "gap_recovered",
        "top-1": "top1_agreement",
        "perplexity ratio": "perplexity_ratio",
        "attention cosine": "attention_cosine",
    }
    gates = [
        {
            "gate": f"{entry['name']} {entry['side']} {entry['limit']:g}",
            "mapped": entry["figure"],
            "native source": entry["source"],
            "verdict": entry["verdict"],
        }
        for entry in report.gates
    ]
    passed = sum(entry["verdict"] == PASS for entry in report.gates)
    config_chosen = kvmap.fitted["config"]
    return Outcome(
        judged={"ridge-k": judged},
        tables={
            "candidates, on the text that chooses": table,
            "arms": arm_rows(judged, arms, figures),
            "controls": [{"control": name, "found": how} for name, how in report.controls.items()],
            "gates": gates,
        },
        sentence=(
            f"k = {config_chosen['k']} of {len(candidates)} candidates recovers "
            f"{said(report.gap_recovered)} of the gap and passes {passed} of "
            f"{len(asdict(config.gates))} gates"
        ),
    )
