"""The few figures that a report opens with, none of which stands without its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.evaluate.report import Report, number, written


@dataclass(frozen=True, slots=True)
class Card:
    label: str
    value: str
    note: str


def summary(report: Report) -> list[Card]:
    metric = report.config["metric"]
    alone = (number(report.arms[name][metric]["value"]) for name in ("target", "source"))
    verdicts = [gate["verdict"] for gate in report.gates]
    return [
        Card(
            f"gap recovered ({metric})",
            written(report.gap_recovered, interval=True),
            "0 is the source alone, 1 the target",
        ),
        Card("target / source alone", " / ".join(alone), metric),
        Card(
            "retention above chance",
            written(report.retention_normalised, interval=True),
            f"retention {written(report.retention, interval=True)}, which counts guessing",
        ),
        Card(
            "top-1 agreement",
            written(report.top1_agreement, interval=True),
            f"perplexity ratio {written(report.perplexity_ratio, interval=True)}",
        ),
        Card(
            "gates passed",
            f"{verdicts.count('pass')} of {len(verdicts)}",
            ", ".join(f"{g['name'].replace('_', ' ')}: {g['verdict']}" for g in report.gates),
        ),
    ]


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
