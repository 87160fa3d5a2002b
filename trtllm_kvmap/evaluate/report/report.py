"""The report a map earned: what report.json holds, and the table a terminal prints of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from trtllm_kvmap.artifact.evidence import PASSED
from trtllm_kvmap.artifact.json_file import read_json
from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.errors import FormatError, MismatchError, UnprovenError
from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis, unlike
from trtllm_kvmap.evaluate.plain_json import require_plain
from trtllm_kvmap.evaluate.provenance import name_of
from trtllm_kvmap.evaluate.report.agreement import require_agreement

FigureJson = dict[str, float | None]  # value, low and high, see bootstrap.Figure


@dataclass(frozen=True, slots=True)
class Report:
    """The content of report.json, key by key. Everything in it is JSON.

    ``arms`` holds every arm's figures, or {"refused": reason}. The figures beside it are those of
    the arm, metric, N and S that ``config`` names; it also says what was asked (asked.asked), of
    which map and by which versions. ``attention_cosine`` is {"mean", "worst",
    "per_layer"}, ``kv_error`` that of kv_error.KvError, ``controls`` maps each control to "passed"
    or to why it could not be judged, ``kvmap`` says how the map was fitted. ``gates`` are those of
    gates.judge_gates, ``chance`` the accuracy of guessing (None without questions), ``contexts``
    the metric context by context ({"tokens": [...], "metric": {arm: [...]}} for source, arm and
    target), and ``latency`` that of latency.measure_latency, or None: not measured.
    """

    arms: dict[str, dict[str, Any]]
    gap_recovered: FigureJson
    retention: FigureJson
    retention_normalised: FigureJson
    top1_agreement: FigureJson
    perplexity_ratio: FigureJson
    attention_cosine: dict[str, Any]
    kv_error: dict[str, Any]
    controls: dict[str, str]
    gates: list[dict[str, Any]]
    chance: float | None
    contexts: dict[str, Any]
    latency: dict[str, Any] | None
    config: dict[str, Any]
    fingerprints: dict[str, Any]
    kvmap: dict[str, Any]
    diagnosis: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @staticmethod
    def from_json(entry: Any, name: str = "This") -> Report:
        """Raises FormatError, which begins with ``name``, for JSON that is no report of this
        version, or contradicts itself.
        """
        names = {f.name for f in fields(Report)}
        if not isinstance(entry, dict) or {"diagnosis", *entry} != names:
            raise FormatError(
                f"{name} is not a report of this version: {unlike(entry, names - {'diagnosis'})}. "
                f"Write it again with `trtllm-kvmap evaluate`."
            )
        require_agreement(entry, name)
        return Report(**entry)

    def with_diagnosis(self, diagnosis: Diagnosis) -> Report:
        """The report with what was found wrong with its map. Raises MismatchError for a diagnosis
        of another map.
        """
        ours, theirs = name_of(self.fingerprints, self.kvmap), diagnosis.config.get("map")
        if ours != theirs:
            raise MismatchError(
                f"The report is of the map {ours} ({self.config['source']} to "
                f"{self.config['target']}) and the diagnosis of {theirs}; diagnose the map that "
                f"was evaluated."
            )
        return replace(self, diagnosis=diagnosis.to_json())

    def save(self, path: str | Path) -> None:
        """Write report.json, whole or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | Path) -> Report:
        """Raises FormatError when there is no report at ``path``."""
        entry = read_json(path, "a report", "trtllm-kvmap evaluate --json")
        require_plain(entry, str(path))
        return Report.from_json(entry, str(path))


def evidence(report: Report) -> dict[str, Any]:
    """What a KvMap keeps of ``report`` (KvMap.with_evidence): the figures, never without the two
    models alone. Raises UnprovenError when a control did not pass.
    """
    failed = {name: said for name, said in report.controls.items() if said != PASSED}
    if failed:
        raise UnprovenError(
            f"The report proves nothing about the map, because of the control "
            f"{'; '.join(f'{name} ({said})' for name, said in failed.items())}. Evaluate it again "
            f"on items that let every control be judged."
        )
    alone = {
        name: {key: report.arms[name][key] for key in ("accuracy", "nll")}
        for name in ("source", "target", "no_context")
    }
    cosine = report.attention_cosine
    return {
        "config": report.config,
        "arms": alone,
        "gap_recovered": report.gap_recovered,
        "retention": report.retention,
        "retention_normalised": report.retention_normalised,
        "top1_agreement": report.top1_agreement,
        "perplexity_ratio": report.perplexity_ratio,
        "attention_cosine": {key: cosine[key] for key in ("mean", "worst")},
        "controls": report.controls,
        "gates": report.gates,
    }


# Plain retention counts guessing and flatters; report.json and the page have it beside these.
COLUMNS = {
    "accuracy": "accuracy",
    "gap_recovered": "gap recovered",
    "retention_normalised": "above chance",
    "nll": "NLL",
    "top1_agreement": "top-1",
}


def scored_arms(report: Report) -> dict[str, dict[str, Any]]:
    """The arms that were not refused, by name."""
    return {name: arm for name, arm in report.arms.items() if "refused" not in arm}


def columns_with_values(report: Report, columns: dict[str, str]) -> dict[str, str]:
    """Those of ``columns`` (figure: heading) that any arm has a value for."""
    scored = scored_arms(report).values()
    return {
        key: heading
        for key, heading in columns.items()
        if any(arm[key]["value"] is not None for arm in scored)
    }


UNRESOLVED = "[unresolved]: source and target are too close on these contexts to tell"


def is_unresolved(report: Report) -> bool:
    """Whether an arm's gap recovered has a value but no interval."""
    gaps = [arm["gap_recovered"] for arm in scored_arms(report).values()]
    return any(g["value"] is not None and None in (g["low"], g["high"]) for g in gaps)


def gap_reason(report: Report) -> str:
    """Why the report has no gap recovered, in a sentence; "" where it has one."""
    if report.gap_recovered["value"] is not None:
        return ""
    metric = report.config["metric"]
    source, target = (report.arms[name][metric] for name in ("source", "target"))
    if None in (source["value"], target["value"]):
        return f"No gap recovered: these contexts give no {metric}."
    return (
        f"There is no gap to recover: in {metric} the source alone, "
        f"{written(source, interval=True)}, is no worse than the target, "
        f"{written(target, interval=True)}. A hand-over has nothing to win here, whatever the "
        f"gates say."
    )


def table(report: Report) -> Table:
    """All arms, one a row, for a rich console of 80 columns; intervals where the gap and its metric
    stand.
    """
    config = report.config
    columns = columns_with_values(report, COLUMNS)
    refused = [f"{name}: {a['refused']}" for name, a in report.arms.items() if "refused" in a]
    shown = Table(
        title=Text(
            f"{config['source']} to {config['target']}, {config['num_items']} contexts, gap "
            f"recovered in {config['metric']}"
        ),
        caption=Text(
            "\n".join(
                [
                    "[low high]: 95 % interval over contexts; above chance: retention without "
                    "guessing",
                    *((UNRESOLVED,) if is_unresolved(report) else ()),
                    *filter(None, (gap_reason(report),)),
                    *(f"gate {gate_sentence(gate)}" for gate in report.gates),
                    *refused,
                ]
            )
        ),
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    shown.add_column("arm", no_wrap=True)
    for heading in columns.values():
        shown.add_column(Text(heading.replace(" ", "\n")), justify="right")
    with_interval = (config["metric"], "gap_recovered")
    for name, arm in report.arms.items():
        if "refused" in arm:
            shown.add_row(Text(name), "refused", style="dim")
            continue
        cells = [Text(written(arm[key], interval=key in with_interval)) for key in columns]
        shown.add_row(Text(name), *cells, style="bold" if name == config["arm"] else None)
    return shown


def written(entry: FigureJson, *, interval: bool, digits: int = 2) -> str:
    """``0.71 [0.64 0.78]``; a dash where the items cannot tell."""
    value, low, high = entry["value"], entry["low"], entry["high"]
    if value is None:
        return "-"
    if not interval:
        return decimal(value)
    if low is None or high is None:
        return f"{fixed(value, digits)} [unresolved]"
    return f"{fixed(value, digits)} [{fixed(low, digits)} {fixed(high, digits)}]"


def gate_sentence(gate: dict[str, Any]) -> str:
    """``retention at least 0.8: pass, 0.89 [0.84 0.94], source alone 0.56 [0.51 0.61]``."""
    ours, theirs = (written(gate[name], interval=True) for name in ("figure", "source"))
    return (
        f"{gate['name'].replace('_', ' ')} {gate['side']} {number(gate['limit'])}: "
        f"{gate['verdict']}, {ours}, source alone {theirs}"
    )


def decimal(value: float | None) -> str:
    """Three digits after the point, as all of a column have; a dash for None."""
    return "-" if value is None else fixed(value, 3)


def fixed(value: float, digits: int) -> str:
    """``digits`` after the point, and no minus before a zero."""
    text = f"{value:.{digits}f}"
    return text if float(text) else text.removeprefix("-")


def number(value: Any) -> str:
    """A setting or a count as the report writes it; a dash for None."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)
