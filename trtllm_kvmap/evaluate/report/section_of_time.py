"""The section on what a hand-over costs: its steps, and from which length on it pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtllm_kvmap.evaluate.latency import (
    NATIVE,
    STAGES,
    WAYS,
    break_even,
    break_even_by_turn,
    turn_ratios,
)
from trtllm_kvmap.evaluate.report import charts
from trtllm_kvmap.evaluate.report.report import Report, fixed
from trtllm_kvmap.evaluate.report.section import Grid, Section, drawn


def time_by_step(report: Report) -> Section:
    latency = report.latency
    if not latency or not latency["lengths"]:
        return Section("Time", "Not measured; `trtllm-kvmap evaluate --latency` does.")
    lengths, turns = latency["lengths"], latency.get("turns")
    rows = []
    for name in (*STAGES, *NATIVE):
        taken = turns and [[1000 * s for s in each] for each in turns[name]]
        middle = [1000 * s for s in latency["seconds"][name]]
        rows.append((name.replace("_", " "), *_with_spread(middle, taken, 1)))
    for way in WAYS:
        taken = turns and turn_ratios(turns, way)
        rows.append((f"{way} ratio", *_with_spread(latency[way], taken, 2)))
    said = " ".join(
        f"{name}: {_equal_from(latency, way)}."
        for name, way in (
            ("When the source has read the prompt", "warm"),
            ("When it reads the prompt first", "cold"),
        )
    )
    spread = (
        "[least most] is the spread over them"
        if turns
        else "this report does not keep single turns, so their spread is not known"
    )
    return Section(
        "Time",
        f"Medians of {latency['rounds']} turns side by side in one run; {spread}. "
        f"Threads: {latency['threads']}. Figures of this machine under its load of that hour. "
        f"Transfer is one copy of the source's cache in memory; a ratio is the hand-over's time "
        f"over the target's own. {said}",
        (
            drawn(
                "Steps of a hand-over from scratch, stacked, over the native target's prefill "
                "and first step, by prompt length.",
                charts.latency_stack,
                latency,
            ),
            drawn(
                "Break-even: the hand-over's time over the native target's, by prompt length; "
                "below 1 the hand-over is faster.",
                charts.break_even_curve,
                latency,
            ),
        ),
        (
            Grid(
                "Milliseconds, and ratios, by tokens of the prompt",
                ("step", *(f"{length:,}" for length in lengths)),
                tuple(rows),
            ),
        ),
    )


def _with_spread(
    middle: Sequence[float], taken: Sequence[Sequence[float]] | None, digits: int
) -> list[str]:
    """``19.2 [18.1 22.5]`` by length; the value alone where single turns are not known."""
    if taken is None:
        return [fixed(value, digits) for value in middle]
    return [
        f"{fixed(value, digits)} [{fixed(min(each), digits)} {fixed(max(each), digits)}]"
        for value, each in zip(middle, taken, strict=True)
    ]


def _equal_from(latency: dict[str, Any], way: str) -> str:
    """Where the hand-over is no slower for good, as far as the turns agree."""
    lengths, turns = latency["lengths"], latency.get("turns")
    if turns is None:
        points = [break_even(lengths, latency[way])]
    else:
        points = break_even_by_turn(lengths, turn_ratios(turns, way))
    found = [point for point in points if point is not None]
    if not found:
        return f"no break-even up to {lengths[-1]:,} tokens"
    if len(found) < len(points):
        return (
            f"no break-even can be told, since {len(found)} of {len(points)} turns have one up to "
            f"{lengths[-1]:,} tokens and the others none"
        )
    low, high = min(found), max(found)
    if high <= lengths[0]:
        return f"faster from {lengths[0]:,} tokens on, the shortest length measured"
    if len(points) == 1:
        return f"break-even at about {high:,.0f} tokens, as far as medians alone can tell"
    least = f"below {lengths[0]:,}" if low <= lengths[0] else f"{low:,.0f}"
    return f"break-even between {least} and {high:,.0f} tokens, by turn"
