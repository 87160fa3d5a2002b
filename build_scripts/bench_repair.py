"""What each choice of repaired tokens gives and costs, tiny-s to tiny-m (run it through bench.py).

Quality is that of evaluate's own arms on unseen documents, with 95 % paired bootstrap intervals;
cost is the time of a whole warm hand-over (ranking where tokens are ranked, map, repair, first
token) over that of the target's own prefill of the same prompt, in turns of one run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_map import ratio

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.select_tokens import rank_by_attention
from trtllm_kvmap.demo import tiny_items
from trtllm_kvmap.evaluate.arms import copy_map, mapped, repair_only
from trtllm_kvmap.evaluate.bootstrap import draw
from trtllm_kvmap.evaluate.reading import judge, read_item
from trtllm_kvmap.evaluate.score import Score
from trtllm_kvmap.evaluate.summary import Draws, arm_figures
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.inject.hf_cache import HfCache, fork
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.plan import HandoffPlan, RepairCost, chunk_boundaries, plan_handoff
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import mostly_facts

ITEMS, ITEMS_SEED, RESAMPLES = 60, 3, 2000  # the documents that the demo reports on
LENGTHS, ROUNDS = (1024, 2048), 5
TOKENS_PER_CHUNK = 64

Ids = torch.Tensor | list[int]
Choice = Callable[[HfCache, Ids], HandoffPlan]
"""From the source's cache and the prompt to the plan; its time counts."""


def bench_repair() -> dict[str, Any]:
    """The figures of `bench.py repair`, see the module."""
    source, target = (load_model(model_folder(name)) for name in ("tiny-s", "tiny-m"))
    bridge = KvBridge(slice_map(source, target), source=source, target=target)
    copy = KvBridge(copy_map(bridge.kvmap), source=source, target=target)
    ids = {length: _prompt(target, length) for length in LENGTHS}
    caches = {length: prefill(source, ids[length]).cache for length in LENGTHS}
    cost = repair_cost(bridge, caches[LENGTHS[0]], ids[LENGTHS[0]])
    choices = choices_of(source, cost)
    arms = {name: (bridge, choice) for name, choice in choices.items()}
    arms["copy, S 4, N 32"] = (copy, choices["S 4, N 32"])
    quality = judge_all(bridge, arms)
    for name, (over, choice) in arms.items():
        quality[name]["time_to_prefill"] = {
            str(length): ratio(
                partial(_hand_over, over, choice, caches[length], ids[length]),
                partial(prefill, target, ids[length], logits_to_keep=1),
                ROUNDS,
            )
            for length in LENGTHS
        }
    return {
        "choices": quality,
        "bars": bars(quality),
        "cost_ms": {"pass": cost.pass_ms, "token": cost.token_ms, "at_tokens": LENGTHS[0]},
        "items": ITEMS,
        "rounds": ROUNDS,
        "threads": torch.get_num_threads(),
    }


def slice_map(source: LoadedModel, target: LoadedModel) -> KvMap:
    """A `slice` map from short documents that are mostly facts, every token counted alike."""
    with tempfile.TemporaryDirectory() as folder:
        moments = calibrate(
            source,
            target,
            [target.tokenise(text) for text in mostly_facts(seed=1, count=400)],
            CalibrationConfig(joint=True),
            Path(folder) / "pair.moments.safetensors",
        )
    return fit(moments, FitConfig(scope="slice", n=12, ridge=1e-5, fields="both"))


def choices_of(source: LoadedModel, cost: RepairCost) -> dict[str, Choice]:
    """Every choice by name: S first and N last tokens, and what is selected besides."""

    def ends(first_tokens: int, repair_window: int) -> Choice:
        return lambda _, ids: plan_handoff(
            len(ids), first_tokens=first_tokens, repair_window=repair_window
        )

    def boundaries(width: int) -> Choice:
        def choose(_: HfCache, ids: Ids) -> HandoffPlan:
            plan = plan_handoff(len(ids), first_tokens=4, repair_window=32)
            ranked = chunk_boundaries(len(ids), TOKENS_PER_CHUNK, width)
            return plan.with_selected(ranked, plan.num_computed + len(ranked))

        return choose

    def attended(repair_window: int, budget: int) -> Choice:
        def choose(cache: HfCache, ids: Ids) -> HandoffPlan:
            plan = plan_handoff(len(ids), first_tokens=4, repair_window=repair_window)
            return plan.with_selected(rank_by_attention(source, cache, ids, plan), budget)

        return choose

    budget_ms = 1.5 * (cost.pass_ms + cost.token_ms * 68)
    return {
        **{f"S {first}, N 32": ends(first, 32) for first in (0, 1, 4, 16)},
        **{f"S 4, N {last}": ends(4, last) for last in (0, 8, 16, 64)},
        f"S 4, N 32, 1 at each boundary of {TOKENS_PER_CHUNK}": boundaries(1),
        f"S 4, N 32, 4 at each boundary of {TOKENS_PER_CHUNK}": boundaries(4),
        "S 4, N 32, attended, 68 tokens in all": attended(32, 68),
        "S 4, N 32, attended, 100 tokens in all": attended(32, 100),
        "S 4, N 8, attended, 36 tokens in all": attended(8, 36),
        f"S 4, N 32, attended, {budget_ms:.2f} ms": attended(32, cost.max_computed(budget_ms)),
    }


def repair_cost(bridge: KvBridge, cache: HfCache, ids: torch.Tensor) -> RepairCost:
    """A straight line through two measured passes, of 32 and of 256 repaired tokens."""

    def milliseconds(tokens: int) -> float:
        start = len(ids) - tokens
        held = prefill(bridge.target, ids[:start]).cache
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            prefill(bridge.target, ids[start:], fork(held), logits_to_keep=1)
            times.append(1000 * (time.perf_counter() - began))
        return median(times)

    few, many = milliseconds(32), milliseconds(256)
    token_ms = (many - few) / (256 - 32)
    return RepairCost(pass_ms=max(few - 32 * token_ms, 0.0), token_ms=token_ms)


def judge_all(
    bridge: KvBridge, arms: dict[str, tuple[KvBridge, Choice]]
) -> dict[str, dict[str, Any]]:
    """Accuracy and gap recovered of every arm, beside the two models alone and repair alone."""
    items = tiny_items(bridge.target, ITEMS, ITEMS_SEED)
    scores: dict[str, list[Score]] = {}
    computed: dict[str, list[int]] = {name: [] for name in arms}
    for item in items:
        reading = read_item(bridge.source, bridge.target, item, (), rollout_steps=1)
        only = partial(repair_only, partial(plan_handoff, first_tokens=4, repair_window=32))
        readies = {"source": reading.source, "target": reading.target, "repair_only": only(reading)}
        for name, (over, choice) in arms.items():
            plan = choice(reading.source.cache, list(item.context))
            computed[name].append(plan.num_computed)
            readies[name] = mapped(over, _always(plan), reading)
        for name, ready in readies.items():
            outcome = judge(ready, reading, length_normalised=False)
            scores.setdefault(name, []).append(outcome.score)
    counts = draw(len(items), RESAMPLES, seed=0)
    draws = {name: Draws(each, counts) for name, each in scores.items()}
    figures = {}
    for name, each in draws.items():
        found = arm_figures(each, draws["source"], draws["target"], "accuracy")
        figures[name] = {key: found[key] for key in ("accuracy", "gap_recovered", "nll")}
        if name in computed:
            figures[name]["tokens_computed"] = sum(computed[name]) / len(items)
    return figures


def bars(figures: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Whether repair 32 stands above the source and repair alone, interval above interval, and
    costs at most half a prefill.
    """
    ours = figures["S 4, N 32"]
    return {
        **{
            f"above_{name}": ours["accuracy"]["low"] > figures[name]["accuracy"]["high"]
            for name in ("source", "repair_only")
        },
        "half_of_prefill_from_2048": all(
            value <= 0.5 for length, value in ours["time_to_prefill"].items() if int(length) >= 2048
        ),
    }


def _always(plan: HandoffPlan) -> Callable[[int], HandoffPlan]:
    return lambda _: plan


def _hand_over(bridge: KvBridge, choice: Choice, cache: HfCache, ids: torch.Tensor) -> None:
    bridge.hand_over(cache, ids, choice(cache, ids))


def _prompt(target: LoadedModel, length: int) -> torch.Tensor:
    """Documents one after another, cut at ``length`` tokens: its words change no time."""
    contexts = [token for item in tiny_items(target, 12, ITEMS_SEED) for token in item.context]
    return torch.tensor(contexts[:length])
