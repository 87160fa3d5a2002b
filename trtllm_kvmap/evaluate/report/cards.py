"""The few figures that a report opens with, none of which stands without its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.evaluate.report.report import FigureJson, Report, number, written


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
            f"0 is the source alone ({alone[1]}), 1 the target ({alone[0]})",
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
    """What was judged, in one sentence or two."""
    config = report.config
    span = config["context_tokens"]
    return (
        f"{number(config['num_items'])} contexts of {number(span['shortest'])} to "
        f"{number(span['longest'])} tokens. The figures below are of the arm {config['arm']}: the "
        f"target computes the first {number(config['S'])} and the last {number(config['N'])} "
        f"tokens itself; [low high] is the 95 % interval over contexts."
    )
