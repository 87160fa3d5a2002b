"""Runs every arm over every item, the controls first, and adds the scores up into a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.arms import Refused, copy_map, make_arms, mapped_arm
from trtllm_kvmap.evaluate.asked import asked, versions
from trtllm_kvmap.evaluate.bootstrap import draw
from trtllm_kvmap.evaluate.controls import check_wrong_document, run_controls
from trtllm_kvmap.evaluate.gates import Gates, judge_gates
from trtllm_kvmap.evaluate.kv_error import KvError
from trtllm_kvmap.evaluate.provenance import provenance
from trtllm_kvmap.evaluate.reading import Outcome, judge, read_item
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.summary import (
    Draws,
    arm_figures,
    chance,
    context_by_context,
    mean_cosines,
)
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item, require_unseen
from trtllm_kvmap.inject.hf_cache import view_pool
from trtllm_kvmap.mapper.backends import Backend
from trtllm_kvmap.models import LoadedModel

Metric = Literal["accuracy", "nll"]
DRAWING_SEED = 0  # of the bootstrap: equal scores give equal intervals


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """How a map is judged. The fields are flags of `trtllm-kvmap evaluate`."""

    metric: Metric = field(
        default="accuracy",
        metadata={
            "help": "what gap recovered is of: accuracy (needs questions), or nll, the loss in nats"
        },
    )
    first_tokens: int = field(
        default=1, metadata={"help": "S: first tokens that the target computes itself"}
    )
    repair_window: int = field(
        default=32, metadata={"help": "N: last tokens that the target computes itself"}
    )
    rollout_steps: int = field(
        default=16, metadata={"help": "greedy tokens of each answer compared with the target's own"}
    )
    length_normalised: bool = field(
        default=False,
        metadata={"help": "divide the score of a choice by its length (see docs/tasks.md)"},
    )
    resamples: int = field(default=2000, metadata={"help": "draws of the bootstrap, for intervals"})
    backend: Backend = field(default="cpu", metadata={"help": "what runs the map"})

    def __post_init__(self) -> None:
        if self.metric not in ("accuracy", "nll"):
            raise InputError(f"metric must be accuracy or nll, got {self.metric!r}.")
        for name in ("first_tokens", "repair_window"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}.")
        for name in ("rollout_steps", "resamples"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")


def evaluate(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    items: Sequence[Item],
    config: EvaluationConfig,
    on_item: Callable[[int, int], None] | None = None,
    gates: Gates = Gates(),  # noqa: B008 - frozen
    task: TaskConfig | None = None,
) -> Report:
    """The report of ``kvmap`` on ``items``; ``on_item(done, total)`` is called after each. The
    ``gates`` are declared here, before anything was seen, and judged in the report. ``task`` is
    what named the items, for the report to say.

    Raises UnprovenError when a control fails, MismatchError for other models than the map's, and
    InputError for items that chose the map, that lack what ``config.metric`` needs, or that are
    too long for a model.
    """
    require_scorable(items, config.metric)
    require_unseen(items, kvmap.fitted.get("selected_on", []))
    bridge = KvBridge(kvmap, source=source, target=target, backend=config.backend)
    arms = make_arms(
        bridge,
        _copy_bridge(bridge, config.backend),
        first_tokens=config.first_tokens,
        repair_window=config.repair_window,
    )
    outcomes: dict[str, list[Outcome]] = {name: [] for name in arms}
    refused: dict[str, str] = {}
    controls: dict[str, str] = {}
    kv_error = KvError(target.spec.num_layers, target.spec.rope)
    for index, item in enumerate(items):
        reading = read_item(
            source,
            target,
            item,
            [*items[index + 1 :], *items[:index]],
            rollout_steps=config.rollout_steps,
        )
        controls = controls or run_controls(kvmap, reading)
        for name, arm in arms.items():
            try:
                ready = arm(reading)
            except Refused as reason:
                refused[name] = str(reason)
                continue
            outcomes[name].append(judge(ready, reading, length_normalised=config.length_normalised))
            if name == mapped_arm(config.repair_window):
                pools = view_pool(ready.cache), view_pool(reading.target.cache)
                kv_error.add(*pools, ready.mapped, target.rope_length(ready.position))
        if on_item is not None:
            on_item(index + 1, len(items))
    counts = draw(len(items), config.resamples, DRAWING_SEED)
    draws = {
        name: Draws([outcome.score for outcome in each], counts)
        for name, each in outcomes.items()
        if name not in refused
    }
    figures = _figures(draws, outcomes, refused, items, config)
    controls["wrong_document"] = check_wrong_document(
        draws, mapped_arm(config.repair_window), config.metric
    )
    return _report(bridge, figures, outcomes, controls, kv_error, items, config, gates, task)


def require_scorable(items: Sequence[Item], metric: str) -> None:
    """Raise InputError for no items, or for items without what ``metric`` is taken from."""
    if not items:
        raise InputError("There are no items to score; give at least one.")
    if metric == "accuracy" and not any(item.questions for item in items):
        raise InputError("No item has a question, so there is no accuracy; use metric=nll.")
    if metric == "nll" and not any(item.continuation for item in items):
        raise InputError("No item has a continuation, so there is no nll; use metric=accuracy.")


def _copy_bridge(bridge: KvBridge, backend: str) -> KvBridge | Refused:
    try:
        copied = copy_map(bridge.kvmap)
    except Refused as reason:
        return reason
    return KvBridge(copied, source=bridge.source, target=bridge.target, backend=backend)


def _figures(
    draws: dict[str, Draws],
    outcomes: dict[str, list[Outcome]],
    refused: dict[str, str],
    items: Sequence[Item],
    config: EvaluationConfig,
) -> dict[str, dict[str, Any]]:
    read = sum(len(item.context) for item in items)
    figures: dict[str, dict[str, Any]] = {}
    for name, each in outcomes.items():
        if name in refused:
            figures[name] = {"refused": refused[name]}
            continue
        cosine = mean_cosines([outcome.cosines for outcome in each])
        figures[name] = {
            **arm_figures(draws[name], draws["source"], draws["target"], config.metric),
            "attention_cosine": cosine["mean"],
            "mapped_share": sum(outcome.mapped_tokens for outcome in each) / read,
        }
    return figures


def _report(
    bridge: KvBridge,
    figures: dict[str, dict[str, Any]],
    outcomes: dict[str, list[Outcome]],
    controls: dict[str, str],
    kv_error: KvError,
    items: Sequence[Item],
    config: EvaluationConfig,
    gates: Gates,
    task: TaskConfig | None,
) -> Report:
    arm = mapped_arm(config.repair_window)
    chosen = figures[arm]
    lengths = [len(item.context) for item in items]
    settings = asdict(config)
    return Report(
        arms=figures,
        gap_recovered=chosen["gap_recovered"],
        retention=chosen["retention"],
        retention_normalised=chosen["retention_normalised"],
        top1_agreement=chosen["top1_agreement"],
        perplexity_ratio=chosen["perplexity_ratio"],
        attention_cosine=mean_cosines([outcome.cosines for outcome in outcomes[arm]]),
        kv_error=kv_error.to_json(),
        controls=controls,
        gates=judge_gates(gates, chosen, figures["source"]),
        chance=chance([outcome.score for outcome in outcomes[arm]]),
        contexts=context_by_context(
            {name: [o.score for o in outcomes[name]] for name in ("source", arm, "target")},
            lengths,
            config.metric,
        ),
        latency=None,
        config={
            "source": bridge.source.name,
            "target": bridge.target.name,
            "arm": arm,
            "metric": settings.pop("metric"),
            "N": settings.pop("repair_window"),
            "S": settings.pop("first_tokens"),
            **settings,
            **asked(items, task),
            "map_digest": bridge.kvmap.map_digest(),
            "versions": versions(),
        },
        **provenance(bridge.kvmap),
    )
