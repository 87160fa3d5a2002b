"""A large model reads, a small one writes: a low-rank ridge map, and a residual on the KL.

The gap here runs the other way: from the small model that writes up to the large one that read.
What the residual changes is the divergence from what the large model says, window by window, and
what the split saves is counted in device-seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.recipes.divergence import teacher_divergence
from trtllm_kvmap.recipes.outcome import Outcome, Row
from trtllm_kvmap.recipes.pair import Pair, PairConfig, require_disjoint
from trtllm_kvmap.recipes.split_compute import compute_rows
from trtllm_kvmap.recipes.steps import (
    RESAMPLES,
    Progress,
    arm_rows,
    chosen,
    judged_map,
    mean_figure,
    moments_of,
    ratio_figure,
    said,
)
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.run import refine
from trtllm_kvmap.tiny import FAMILY


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PairConfig):
    """``lessons`` train the residual: contexts and what is said after them (text of your own: as
    many documents of what fits, their last quarters said). Compute is counted at each of
    ``lengths`` with a reply of ``reply_tokens``.
    """

    candidates: FitGrid
    residual: RefineConfig
    lessons: TaskConfig
    lengths: tuple[int, ...]
    reply_tokens: int

    def __post_init__(self) -> None:
        if self.residual.term != "residual":
            raise InputError(f"residual needs the term residual, got {self.residual.term!r}.")
        if self.reply_tokens < 1 or not self.lengths:
            raise InputError("reply_tokens must be at least 1, and lengths needs at least one.")


def run(config: Config, pair: Pair, on_progress: Progress) -> Outcome:
    windows = [item for item in pair.report if item.continuation]
    if not windows:
        raise InputError("The report's items have no continuation, so there is no divergence.")
    moments = moments_of(pair, config.calibration, on_progress)
    ridge, table = chosen(pair, moments, config.candidates.candidates(), config.judged, on_progress)
    documents, continuations = lessons_of(config, pair)
    refined = refine(
        multiplied_out(ridge),
        pair.source,
        pair.target,
        documents,
        config.residual,
        continuations=continuations,
        on_step=lambda done, total: on_progress("train the residual", done, total),
    )
    judged = {
        name: judged_map(pair, kvmap, config.judged, on_progress)
        for name, kvmap in (("ridge", ridge), ("ridge-residual", refined))
    }
    divergences = {
        name: [
            teacher_divergence(
                KvBridge(each.kvmap, source=pair.source, target=pair.target),
                pair.source,
                item,
                config.judged,
            )
            for item in windows
        ]
        for name, each in judged.items()
    }
    before, after = divergences.values()
    ratio = ratio_figure(after, before)
    alone = {"native target (writes)": "target", "native source (reads)": "source"}
    figures = {"accuracy": "accuracy", "NLL": "nll", "top-1 with target": "top1_agreement"}
    rows = [{**row, "gap to the source": None} for row in arm_rows(judged["ridge"], alone, figures)]
    for name, each in judged.items():
        (row,) = arm_rows(each, {name: each.report.config["arm"]}, figures)
        rows.append({**row, "gap to the source": lifted(each.report)})
    compute = compute_rows(
        KvBridge(refined, source=pair.source, target=pair.target),
        pair.source,
        config.judged,
        lengths=config.lengths,
        reply_tokens=config.reply_tokens,
    )
    savings = [row["active saved"] for row in compute]
    return Outcome(
        judged=judged,
        tables={
            "candidates, on the text that chooses": table,
            "arms": rows,
            "KL from what the reader says, nats a token": [
                {
                    "windows": len(before),
                    "ridge": mean_figure(before),
                    "with residual": mean_figure(after),
                    "residual over ridge": ratio,
                    "scale": refined.fitted["refined"]["scale"],
                }
            ],
            "distance from the writer's own cache": _distances(judged["ridge"].report),
            f"device-seconds, a reply of {config.reply_tokens} tokens": compute,
        },
        sentence=(
            f"ridge closes {said(lifted(judged['ridge'].report))} of the gap from the writer to "
            f"the reader, the residual leaves {said(ratio)} of the KL, and the split saves "
            f"{min(savings):.0%} to {max(savings):.0%} active compute"
        ),
    )


def lessons_of(
    config: Config, pair: Pair
) -> tuple[Sequence[Sequence[int]], list[list[Sequence[int]]] | None]:
    """The documents that train the residual, and what is said after each (None: their ends)."""
    if config.source not in FAMILY:
        return pair.documents[: config.lessons.num_items], None
    items = read_items(config.lessons, pair.target.tokenizer)
    documents = [item.context for item in items]
    for others, does in ((pair.selection, "chooses"), (pair.report, "judges")):
        require_disjoint(documents, others, f"trains the residual and the text that {does}")
    return documents, [[item.continuation] for item in items]


def multiplied_out(kvmap: KvMap) -> KvMap:
    """The same map with the product of its low-rank factors as the matrix: a group of the file has
    room for one second term, and the residual takes it.
    """
    groups = []
    for group in kvmap.groups:
        linear = group.linear() if group.second is not None else None
        if linear is not None:
            weight, bias = linear
            group = replace(group, weight=weight, bias=bias, second=None, weight_scale=None)
        groups.append(group)
    return replace(kvmap, groups=tuple(groups))


def lifted(report: Report) -> dict[str, float | None]:
    """(mapped - target) / (source - target), context by context: 0 is the small model that writes,
    1 the large one that read.
    """
    config = report.config
    sign = 1 if config["metric"] == "accuracy" else -1
    metric = report.contexts["metric"]
    names = {key for key in metric if key not in ("source", "target")}
    (arm,) = names
    scored = [
        each
        for each in zip(metric[arm], metric["source"], metric["target"], strict=True)
        if None not in each
    ]
    mapped, source, target = sign * np.array(scored).T
    counts = draw(len(scored), RESAMPLES, 0)
    gap = counts @ (source - target)
    share = np.divide(counts @ (mapped - target), gap, out=np.full(len(gap), np.nan), where=gap > 0)
    return figure(share).to_json()


def _distances(report: Report) -> list[Row]:
    """Means over layers; None where nothing was mapped."""
    rows = []
    for field, layers in report.kv_error.items():
        known = {name: [v for v in each if v is not None] for name, each in layers.items()}
        means = {name: sum(each) / len(each) if each else None for name, each in known.items()}
        rows.append({"field": field, **means})
    return rows
