"""How long each step of a hand-over takes beside the prefill it replaces, by prompt length."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice
from statistics import median
from typing import Any, TypeVar

import torch

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.inject.hf_cache import fork, take_span
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
ROUNDS = 5
NEW_TOKENS = 2  # the first comes from the prompt's logits, the second takes a step of the model
STAGES = ("source_prefill", "transfer", "own_tokens", "map", "repair", "first_step")
NATIVE = ("target_prefill", "target_first_step")
WAYS = {"warm": STAGES[1:], "cold": STAGES}  # whether the source has read the prompt already
Turns = dict[str, list[list[float]]]  # {stage: [lengths][rounds]} in seconds
Result = TypeVar("Result")


def measure_latency(
    bridge: KvBridge,
    source: LoadedModel,
    items: Sequence[Item],
    config: EvaluationConfig,
    *,
    lengths: Sequence[int] = LENGTHS,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """JSON: ``lengths`` in tokens, ``turns`` {stage: [lengths][rounds]} in seconds of the hand-over
    and of ``target_prefill`` + ``target_first_step``, in ``rounds`` turns that the two ways take
    one after another, and their medians, ``seconds`` {stage: [lengths]}; ``warm`` and ``cold``
    [lengths], medians over turns of the hand-over's time over the native target's in the same turn,
    when the source has read the prompt already and when it has not (1 is equal).

    ``transfer`` is one copy of the source's cache in memory, ``own_tokens`` the first tokens that
    the target computes itself, ``first_step`` its first step of decoding. Prompts are the contexts
    of ``items``, one after another; lengths that a model cannot hold are left out.

    Raises InputError for models that are not on a CPU: the clock here does not wait for a GPU.
    """
    for model in (source, bridge.target):
        if model.device.type != "cpu":
            raise InputError(
                f"{model.name} is on {model.device}; steps are timed on a CPU only, because the "
                f"clock does not wait for a GPU. Leave the latency out."
            )
    limit = min(source.spec.max_positions, bridge.target.spec.max_positions) - NEW_TOKENS
    least = config.first_tokens + config.repair_window
    kept = [length for length in lengths if least < length <= limit]
    text = cycle(chain.from_iterable(item.context for item in items))
    turns: dict[str, list[list[float]]] = {}
    for length in kept:
        prompt = list(islice(text, length))
        _turn(bridge, source, prompt, config)  # warms up
        taken = [_turn(bridge, source, prompt, config) for _ in range(rounds)]
        for name in taken[0]:
            turns.setdefault(name, []).append([turn[name] for turn in taken])
    return {
        "lengths": kept,
        "turns": turns,
        "seconds": {name: [median(each) for each in rows] for name, rows in turns.items()},
        **ratios(turns),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def ratios(turns: Turns) -> dict[str, list[float]]:
    """``warm`` and ``cold`` by length: medians over turns."""
    return {name: [median(row) for row in turn_ratios(turns, name)] for name in WAYS}


def turn_ratios(turns: Turns, way: str) -> list[list[float]]:
    """[lengths][rounds]: the hand-over's time over the native target's in the same turn, ``warm``
    or ``cold``.
    """

    def sums(stages: Sequence[str]) -> list[list[float]]:
        by_stage = [turns[stage] for stage in stages if turns]
        return [
            [sum(turn) for turn in zip(*rows, strict=True)] for rows in zip(*by_stage, strict=True)
        ]

    return [
        [ours / theirs for ours, theirs in zip(*pair, strict=True)]
        for pair in zip(sums(WAYS[way]), sums(NATIVE), strict=True)
    ]


def break_even(lengths: Sequence[int], ratio: Sequence[float]) -> float | None:
    """The prompt length in tokens from which the hand-over is no slower for good: where ``ratio``
    falls to 1 for the last time, between two lengths on a straight line. The first length when all
    are below, None when the last is not.
    """
    if not lengths or ratio[-1] > 1:
        return None
    last = max((i for i, r in enumerate(ratio) if r > 1), default=None)
    if last is None:
        return float(lengths[0])
    share = (ratio[last] - 1) / (ratio[last] - ratio[last + 1])
    return lengths[last] + share * (lengths[last + 1] - lengths[last])


def break_even_by_turn(
    lengths: Sequence[int], rows: Sequence[Sequence[float]]
) -> list[float | None]:
    """break_even of each turn, from turn_ratios [lengths][rounds]: how far turns agree says how
    much of it is the machine's load.
    """
    return [break_even(lengths, curve) for curve in zip(*rows, strict=True)]


def _turn(
    bridge: KvBridge, source: LoadedModel, prompt: list[int], config: EvaluationConfig
) -> dict[str, float]:
    target = bridge.target
    plan = plan_handoff(
        len(prompt), first_tokens=config.first_tokens, repair_window=config.repair_window
    )
    native, target_prefill = _timed(lambda: prefill(target, prompt, logits_to_keep=1))
    _, target_step = _timed(lambda: generate(target, native.cache, native.logits[-1], NEW_TOKENS))
    read, source_prefill = _timed(lambda: prefill(source, prompt, logits_to_keep=1))
    _, transfer = _timed(lambda: take_span(read.cache, plan.mapped))
    handed = bridge.hand_over(read.cache, prompt, plan)
    _, step = _timed(lambda: generate(target, fork(handed.cache), handed.logits, NEW_TOKENS))
    return {
        "source_prefill": source_prefill,
        "transfer": transfer,
        "own_tokens": handed.seconds["first"] + handed.seconds["splice"],
        "map": handed.seconds["map"],
        "repair": handed.seconds["repair"],
        "first_step": step,
        "target_prefill": target_prefill,
        "target_first_step": target_step,
    }


def _timed(step: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    result = step()
    return result, time.perf_counter() - began
