"""Sets the guard of a map: on hand-overs of it and of damaged copies, judged by what came after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.signals import WINDOW, Signals, measure_signals
from trtllm_kvmap.decode.select_tokens import rank_by_attention
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.damage import damaged_maps
from trtllm_kvmap.evaluate.probe import Ready
from trtllm_kvmap.evaluate.reading import Reading, judge, read_item
from trtllm_kvmap.evaluate.run import Metric, require_scorable
from trtllm_kvmap.evaluate.tasks.items import Item, require_unseen
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

RIDGE = 1e-2  # of the weighing, on standardised signals
STEPS = 50
EDGE = 1e-9  # a case at the limit itself is taken back, however its score is rounded


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """How a guard is set. The fields are flags of `trtllm-kvmap guard`."""

    metric: Metric = field(
        default="accuracy",
        metadata={"help": "by what a continuation is worse than the source's"},
    )
    first_tokens: int = field(
        default=1, metadata={"help": "S: first tokens that the target computes itself"}
    )
    repair_window: int = field(
        default=32, metadata={"help": "N: last tokens that the target computes itself"}
    )
    selected_tokens: int = field(
        default=0, metadata={"help": "tokens between that it computes too, as generate has it"}
    )
    recall: bool = field(
        default=False,
        metadata={"help": "weigh what the target recalls too; for long prompts (docs/policies.md)"},
    )
    missed: float = field(
        default=0.01,
        metadata={
            "help": "the share of bad hand-overs, of each kind of traffic, that may be let through"
        },
    )
    taken_back: float = field(
        default=0.1, metadata={"help": "the share of other hand-overs that may be taken back"}
    )
    damage_seed: int = field(default=0, metadata={"help": "draws the damaged maps"})

    def __post_init__(self) -> None:
        if self.metric not in ("accuracy", "nll"):
            raise InputError(f"metric must be accuracy or nll, got {self.metric!r}.")
        if self.repair_window < 2 or min(self.first_tokens, self.selected_tokens) < 0:
            raise InputError(
                f"A guard needs a repair_window of at least 2, and first_tokens and "
                f"selected_tokens of at least 0; got {self.repair_window}, {self.first_tokens} and "
                f"{self.selected_tokens}."
            )
        for name in ("missed", "taken_back"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(
                    f"{name} must be a share from 0 to below 1, got {getattr(self, name)}."
                )


@dataclass(frozen=True, slots=True)
class Case:
    """One hand-over: its signals, and how well the target went on from it and the source alone
    (higher is better, one scale for both). ``kind`` names the traffic it is of.
    """

    signals: Signals
    mapped: float
    source: float
    kind: str = ""

    @property
    def bad(self) -> bool:
        """The map is bad for this request: staying with the source would have been better."""
        return self.mapped < self.source


def set_guard(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    items: Mapping[str, Sequence[Item]],
    config: GuardConfig,
    on_map: Callable[[int], None] | None = None,
) -> Guard:
    """A guard for ``kvmap`` from ``items`` by the kind of traffic they are of (damaged_cases).

    Raises InputError for items that helped to choose the map, that ``config.metric`` cannot be
    taken from, or of which no hand-over turns out bad, or all do.
    """
    cases = damaged_cases(kvmap, source, target, items, config, on_map)
    return fit_guard(cases, config, [item.digest for each in items.values() for item in each])


def damaged_cases(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    items: Mapping[str, Sequence[Item]],
    config: GuardConfig,
    on_map: Callable[[int], None] | None = None,
) -> list[Case]:
    """Each of ``items``, by the kind of traffic they are of, handed over by ``kvmap`` and by every
    damaged copy of it. In memory are, for all items, the caches of both models. ``on_map(done)`` is
    called after each map. Raises as set_guard for items.
    """
    kinds = [kind for kind, each in items.items() for _ in each]
    told = list(chain.from_iterable(items.values()))
    _require_scorable(items, config.metric)
    require_unseen(told, kvmap.fitted.get("selected_on", []))
    readings = [read_item(source, target, item, (), rollout_steps=1) for item in told]
    alone = [quality(reading.source, reading, config.metric) for reading in readings]
    cases: list[Case] = []
    for done, each in enumerate(chain([kvmap], damaged_maps(kvmap, config.damage_seed)), start=1):
        bridge = KvBridge(each, source=source, target=target)
        for reading, quality_alone, kind in zip(readings, alone, kinds, strict=True):
            cases.append(run_case(bridge, reading, quality_alone, config, kind))
        if on_map is not None:
            on_map(done)
    return cases


def _require_scorable(items: Mapping[str, Sequence[Item]], metric: str) -> None:
    """require_scorable of every single item: each hand-over is judged apart."""
    require_scorable(list(chain.from_iterable(items.values())), metric)
    for kind, each in items.items():
        lacking = sum(not (i.questions if metric == "accuracy" else i.continuation) for i in each)
        if lacking:
            what, other = (
                ("question", "nll") if metric == "accuracy" else ("continuation", "accuracy")
            )
            raise InputError(
                f"{lacking} of the {len(each)} items of {kind!r} have no {what}, so there is no "
                f"{metric} of them; use metric={other}, or leave them out."
            )


def run_case(
    bridge: KvBridge, reading: Reading, alone: float, config: GuardConfig, kind: str = ""
) -> Case:
    """Hand ``reading`` over, look at the signals, then at what came of it; ``alone`` is the quality
    of the source by itself.
    """
    ids, cache = list(reading.item.context), reading.source.cache
    plan = plan_handoff(
        len(ids), first_tokens=config.first_tokens, repair_window=config.repair_window
    )
    if config.selected_tokens:
        ranked = rank_by_attention(reading.source.model, cache, ids, plan)
        plan = plan.with_selected(ranked, plan.num_computed + config.selected_tokens)
    handed = bridge.hand_over(cache, ids, plan, keep_logits=WINDOW)
    ready = Ready(bridge.target, handed.cache, handed.logits, len(ids), plan.mapped)
    return Case(
        signals=measure_signals(bridge, cache, ids, handed, recall=config.recall),
        mapped=quality(ready, reading, config.metric),
        source=alone,
        kind=kind,
    )


def quality(ready: Ready, reading: Reading, metric: str) -> float:
    """The share of right answers, or minus the nats per token of the continuation."""
    score = judge(ready, reading, length_normalised=False).score
    return score.correct / score.questions if metric == "accuracy" else -score.nll / score.tokens


def fit_guard(cases: Sequence[Case], config: GuardConfig, digests: Sequence[str]) -> Guard:
    """The guard of ``cases``: with ``config.recall``, one for hosts that measure no recall, and
    within it the one for those that do.
    """
    bad, kinds = (np.array([getattr(case, name) for case in cases]) for name in ("bad", "kind"))
    if not bad.any() or bad.all():
        raise InputError(
            f"{int(bad.sum())} of {len(bad)} hand-overs were worse than the source, and a guard "
            f"needs such and others. Give more items, or items that the two models answer "
            f"differently."
        )
    plain, *recalling = (
        _fit(
            np.array([case.signals.to_features(recall) for case in cases]),
            bad,
            kinds,
            config,
            digests,
        )
        for recall in ((False, True) if config.recall else (False,))
    )
    return replace(plain, recalling=recalling[0]) if recalling else plain


def _fit(
    signals: np.ndarray,
    bad: np.ndarray,
    kinds: np.ndarray,
    config: GuardConfig,
    digests: Sequence[str],
) -> Guard:
    """Weights by logistic regression, bad cases and others weighing the same. At most
    ``config.missed`` of the bad cases of each kind lie below the limit, and it is set as low as
    ``config.taken_back`` of the others allows, most of which are damaged maps: what is unlike all
    of these is then taken back sooner. Scores are counted from the limit.
    """
    weights, bias = _logistic(signals, bad)
    scores = signals @ weights + bias
    of_kind = {str(kind): kinds == kind for kind in dict.fromkeys(kinds)}
    limit = min(
        float(np.quantile(scores[~bad], 1 - config.taken_back)),
        *(
            float(np.quantile(scores[bad & those], config.missed, method="lower"))
            for those in of_kind.values()
            if (bad & those).any()
        ),
    )
    fell_back = scores >= limit
    return Guard(
        weights=tuple(weights.tolist()),
        bias=bias - limit + EDGE,
        limit=0.0,
        measured={
            "metric": config.metric,
            "S": config.first_tokens,
            "N": config.repair_window,
            "selected_tokens": config.selected_tokens,
            "set_on": list(digests),
            **rates(fell_back, bad),
            "kinds": {kind: rates(fell_back[those], bad[those]) for kind, those in of_kind.items()},
        },
    )


def rates(fell_back: np.ndarray, bad: np.ndarray) -> dict[str, Any]:
    """What a guard got wrong: ``false_fallback_rate`` of the hand-overs that were not bad, and
    ``missed_bad_rate`` of the bad ones; None where there were none.
    """
    return {
        "cases": len(bad),
        "bad": int(bad.sum()),
        "false_fallback_rate": float(fell_back[~bad].mean()) if (~bad).any() else None,
        "missed_bad_rate": float((~fell_back)[bad].mean()) if bad.any() else None,
    }


def _logistic(signals: np.ndarray, bad: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights and bias of log-odds that a case is bad, by Newton's method with a ridge."""
    centre, scale = signals.mean(0), signals.std(0) + 1e-6
    x = np.column_stack([(signals - centre) / scale, np.ones(len(signals))])
    share = np.where(bad, 0.5 / bad.mean(), 0.5 / (~bad).mean()) / len(bad)
    ridge = np.diag([RIDGE] * signals.shape[1] + [1e-9])
    beta = np.zeros(x.shape[1])
    for _ in range(STEPS):
        odds = 1 / (1 + np.exp(-(x @ beta)))
        slope = x.T @ (share * (odds - bad)) + ridge @ beta
        curve = (x.T * (share * odds * (1 - odds))) @ x + ridge
        beta -= np.linalg.solve(curve, slope)
    weights = beta[:-1] / scale
    return weights, float(beta[-1] - weights @ centre)
