"""What a diagnosis says of other lengths, as text: a gap beside the figures it is taken from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis, FigureJson, LengthRow

BEYOND = {True: "longer", False: "within", None: "not known"}
FIGURES: dict[str, Callable[[LengthRow], tuple[FigureJson, FigureJson, FigureJson]]] = {
    "accuracy": lambda row: (row.accuracy, row.source_accuracy, row.target_accuracy),
    "nll": lambda row: (row.nll, row.source_nll, row.target_nll),
}
TITLES = {"accuracy": "Accuracy by length", "nll": "Loss by length (nats per token)"}


@dataclass(frozen=True, slots=True)
class LengthTable:
    """One measure at every length: ``figures`` [lengths] are of the map, the source alone and the
    target; ``rows`` are the same as text, with the gap recovered where it is of this measure.
    """

    measure: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: tuple[tuple[FigureJson, FigureJson, FigureJson], ...]


def length_tables(found: Diagnosis, cell: Callable[[FigureJson], str]) -> list[LengthTable]:
    """One table for each measure that was taken; ``cell`` writes a figure."""
    metric = found.config.get("metric")
    gap = f"gap recovered in {metric}" if metric else "gap recovered (of which metric is not said)"
    tables = []
    for measure, figures in FIGURES.items():
        taken = tuple(figures(row) for row in found.lengths)
        if all(mapped["value"] is None for mapped, _, _ in taken):
            continue
        of_gap, of_loss = measure == (metric or "nll"), measure == "nll"
        names = [gap] * of_gap + ["mapped", "source", "target"] + ["KL, nats"] * of_loss
        header = ("tokens", *names, "calibration")
        rows = []
        for row, three in zip(found.lengths, taken, strict=True):
            first, last = (row.gap_recovered,) * of_gap, (row.divergence,) * of_loss
            said = map(cell, (*first, *three, *last))
            rows.append((f"{row.tokens:,}", *said, BEYOND[row.beyond_calibration]))
        tables.append(LengthTable(measure, TITLES[measure], header, tuple(rows), taken))
    return tables
