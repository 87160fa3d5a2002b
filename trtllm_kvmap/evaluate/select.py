"""Chooses k, n, ridge and scope by the target's own loss, or by its attention outputs, on items
that no report will see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError, KvMapError, MismatchError
from trtllm_kvmap.evaluate.arms import Arm, mapped
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.reading import Outcome, Reading, judge, read_item
from trtllm_kvmap.evaluate.run import DRAWING_SEED, EvaluationConfig, require_scorable
from trtllm_kvmap.evaluate.summary import Draws, gap, mean_cosines
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.fit.layer_r2 import layer_r2
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.spec.slices import FIELDS

ChooseBy = Literal["loss", "cosine"]
FIGURES = (
    "parameters",
    "r2_key",
    "r2_value",
    "attention_cosine",
    "nll",
    "accuracy",
    "gap_recovered",
    "intervals",
)


def select(
    moments: MomentSet | Sequence[MomentSet],
    candidates: Sequence[FitConfig],
    source: LoadedModel,
    target: LoadedModel,
    items: Sequence[Item],
    config: EvaluationConfig,
    on_candidate: Callable[[int, int], None] | None = None,
    choose_by: ChooseBy = "loss",
) -> tuple[KvMap, list[dict[str, Any]]]:
    """The best of ``candidates`` and the table of all of them, one row each, in order.

    Each is fitted from the same ``moments`` (all shards of the pair, if several) and hands
    ``items`` over with the S and N of ``config``. By ``loss`` the lowest NLL of the continuations
    wins (without continuations the highest accuracy); by ``cosine`` the highest mean cosine of the
    target's attention outputs with its own, which needs no right answers. A row's
    ``intervals``, {figure: [low, high]}, are 95 % over items. The map's ``fitted`` keeps the table,
    the winner's cosine by layer, and the digests of the items, so that evaluate refuses to report
    on them. In memory are two maps and, for all items, the caches of both models.

    A candidate that does not suit the pair or the moments is a row with its reason; raises
    MismatchError when none is left. ``on_candidate(done, total)`` is called after each.
    """
    if not candidates:
        raise InputError("There are no candidates to choose from; give at least one.")
    require_scorable(items, config.metric)
    readings = [
        read_item(source, target, item, (), rollout_steps=config.rollout_steps) for item in items
    ]
    counts = draw(len(items), config.resamples, DRAWING_SEED)
    alone = {
        "source": _draws(_judge(lambda reading: reading.source, readings, config), counts),
        "target": _draws(_judge(lambda reading: reading.target, readings, config), counts),
    }
    table: list[dict[str, Any]] = []
    least, best, best_row, best_outcomes = math.inf, None, {}, []
    for number, candidate in enumerate(candidates):
        row: dict[str, Any] = {"chosen": False, "config": asdict(candidate), "refused": None}
        row |= dict.fromkeys(FIGURES)
        table.append(row)
        try:
            kvmap = fit(moments, candidate)
        except KvMapError as error:
            row["refused"] = str(error)
        else:
            outcomes = _judge(_arm(kvmap, source, target, config), readings, config)
            row |= _figures(kvmap, _draws(outcomes, counts), alone, config.metric)
            row["attention_cosine"] = mean_cosines([each.cosines for each in outcomes])["mean"]
            loss = _loss(row, choose_by)
            if loss < least:
                least, best, best_row, best_outcomes = loss, kvmap, row, outcomes
        if on_candidate is not None:
            on_candidate(number + 1, len(candidates))
    if best is None:
        raise MismatchError(
            f"None of the {len(candidates)} candidates gives a map; the first one: "
            f"{table[0]['refused'] or f'its {choose_by} is not a number'}"
        )
    best_row["chosen"] = True
    fitted = {
        **best.fitted,
        "candidates": table,
        "selection": {
            "items": len(items),
            "S": config.first_tokens,
            "N": config.repair_window,
            "metric": config.metric,
            "chosen_by": choose_by,
            **{name: _scores(draws) for name, draws in alone.items()},
        },
        "selected_on": [item.digest for item in items],
        "attention_cosine": mean_cosines([outcome.cosines for outcome in best_outcomes]),
        "layer_r2": layer_r2(moments),
    }
    return replace(best, fitted=fitted), table


def _loss(row: dict[str, Any], choose_by: ChooseBy) -> float:
    """What the winner has least of."""
    if choose_by == "cosine":
        return float(-row["attention_cosine"])
    return float(-row["accuracy"] if row["nll"] is None else row["nll"])


def _arm(kvmap: KvMap, source: LoadedModel, target: LoadedModel, config: EvaluationConfig) -> Arm:
    bridge = KvBridge(kvmap, source=source, target=target, backend=config.backend)
    planner = partial(
        plan_handoff, first_tokens=config.first_tokens, repair_window=config.repair_window
    )
    return partial(mapped, bridge, planner)


def _judge(arm: Arm, readings: Sequence[Reading], config: EvaluationConfig) -> list[Outcome]:
    return [
        judge(arm(reading), reading, length_normalised=config.length_normalised)
        for reading in readings
    ]


def _draws(outcomes: Sequence[Outcome], counts: np.ndarray) -> Draws:
    return Draws([outcome.score for outcome in outcomes], counts)


def _figures(kvmap: KvMap, draws: Draws, alone: dict[str, Draws], metric: str) -> dict[str, Any]:
    recovered = gap(draws, alone["source"], alone["target"], metric)
    return {
        "parameters": kvmap.num_parameters,
        **{f"r2_{field}": kvmap.fitted["r2"][field]["mean"] for field in FIELDS},
        **_scores(draws, gap_recovered=recovered),
    }


def _scores(draws: Draws, **more: np.ndarray) -> dict[str, Any]:
    """NLL, accuracy and ``more`` as values (None: not known), and their ``intervals``."""
    taken = {"nll": draws.nll, "accuracy": draws.accuracy, **more}
    found = {name: figure(values) for name, values in taken.items()}
    return {
        **{name: each.value for name, each in found.items()},
        "intervals": {name: [each.low, each.high] for name, each in found.items()},
    }
