"""The few figures that a report opens with, none of which stands without its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtllm_kvmap.evaluate.report.report import FigureJson, Report, gap_reason, number, written


@dataclass(frozen=True, slots=True)
class Card:
    label: str
    value: str
    interval: str
    note: str


def summary(report: Report) -> list[Card]:
    metric, arms = report.config["metric"], report.arms
    alone = [written(arms[name][metric], interval=True) for name in ("target", "source")]
    verdicts = [gate["verdict"] for gate in report.gates]
    return [
        _card(
            f"gap recovered in {metric}",
            report.gap_recovered,
            gap_reason(report) or f"0 is the source alone ({alone[1]}), 1 the target ({alone[0]})",
        ),
        _card(
            "retention above chance",
            report.retention_normalised,
            f"with what guessing retains: {written(report.retention, interval=True)}",
        ),
        _card(
            "top-1 agreement",
            report.top1_agreement,
            f"with the native target; perplexity ratio "
            f"{written(report.perplexity_ratio, interval=True)}",
        ),
        Card(
            "gates passed",
            f"{verdicts.count('pass')} of {len(verdicts)}",
            "",
            ", ".join(f"{g['name'].replace('_', ' ')}: {g['verdict']}" for g in report.gates),
        ),
    ]


def _card(label: str, figure: FigureJson, note: str) -> Card:
    value, _, interval = written(figure, interval=True).partition(" ")
    return Card(label, value, interval, note)


def opening(report: Report) -> str:
    """What was judged, in a few sentences."""
    config = report.config
    span = config["context_tokens"]
    asked = config.get("num_questions")
    questions = "" if asked is None else f" with {number(asked)} questions"
    task = config.get("task")
    named = "" if task is None else f" of the task {task} ({drawn_from(config)})"
    return (
        f"{number(config['num_items'])} contexts{named} of {number(span['shortest'])} to "
        f"{number(span['longest'])} tokens{questions}. The figures below are of the arm "
        f"{config['arm']}: the target computes the first {number(config['S'])} and the last "
        f"{number(config['N'])} tokens itself; [low high] is the 95 % interval over contexts."
    )


def drawn_from(config: dict[str, Any]) -> str:
    """``seed 3``, or ``from held-out.txt, after the first 20``: which items of a task."""
    source = f"from {config['data']}" if config["data"] else f"seed {config['seed']}"
    return f"{source}, after the first {number(config['skip'])}" if config["skip"] else source
