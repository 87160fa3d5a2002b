"""Measures the speeds that routing asks for, with the models of this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.routing.speeds import Speeds, Timing
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache, fork
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

DECODED = 16


def measure_speeds(
    bridge: KvBridge,
    source: LoadedModel,
    lengths: Sequence[int],
    *,
    first_tokens: int = 1,
    repair_window: int = 32,
    rounds: int = 3,
) -> Speeds:
    """Medians of ``rounds`` at each of ``lengths`` (tokens, ascending), every phase in turn; models
    share this process's memory, so nothing is transferred. Raises InputError for lengths that leave
    nothing to map or do not fit a model, and for models that are not on a CPU: the clock here does
    not wait for a GPU.
    """
    target = bridge.target
    for model in (source, target):
        if model.device.type != "cpu":
            raise InputError(
                f"{model.name} is on {model.device}; speeds are measured on a CPU only, because "
                f"the clock does not wait for a GPU. Measure there, and give a file of speeds."
            )
    if not lengths or min(lengths) <= first_tokens + repair_window:
        raise InputError(
            f"Speeds are measured at lengths above {first_tokens + repair_window} tokens, the "
            f"first and the repaired ones; got {list(lengths)}."
        )
    found: dict[str, list[tuple[int, float]]] = {}
    for length in lengths:
        vocab = min(source.spec.vocab_size, target.spec.vocab_size)
        ids = (torch.arange(length) % vocab).tolist()
        plan = plan_handoff(length, first_tokens=first_tokens, repair_window=repair_window)
        read = prefill(source, ids, logits_to_keep=1)
        handoff = bridge.hand_over(read.cache, ids, plan)  # the first one warms up
        turns: dict[str, list[float]] = {}
        for _ in range(rounds):
            handoff = bridge.hand_over(read.cache, ids, plan)
            taken = dict(handoff.seconds)
            repaired = taken.pop("repair")
            for name, seconds in (
                ("source_prefill", timed_prefill(source, ids)),
                ("target_prefill", timed_prefill(target, ids)),
                ("map", sum(taken.values())),
                ("repair", repaired),
            ):
                turns.setdefault(name, []).append(seconds)
        for name, each in turns.items():
            tokens = length - repair_window if name == "map" else length
            found.setdefault(name, []).append((tokens, median(each)))
    own, handed = (read.cache, read.logits[-1]), (handoff.cache, handoff.logits)
    return Speeds(
        source_prefill=Timing(tuple(found["source_prefill"])),
        target_prefill=Timing(tuple(found["target_prefill"])),
        map=Timing(tuple(found["map"])),
        repair=Timing(tuple(found["repair"])),
        repair_window=repair_window,
        source_decode=median(decode_rate(source, *own) for _ in range(rounds)),
        target_decode=median(decode_rate(target, *handed) for _ in range(rounds)),
    )


def timed_prefill(loaded: LoadedModel, token_ids: Sequence[int]) -> float:
    """Seconds to read a prompt and know its last logits."""
    began = time.perf_counter()
    prefill(loaded, token_ids, logits_to_keep=1)
    return time.perf_counter() - began


def decode_rate(loaded: LoadedModel, cache: HfCache, logits: torch.Tensor) -> float:
    """Tokens a second on top of ``cache``, which is not changed."""
    own = fork(cache)
    began = time.perf_counter()
    generate(loaded, own, logits, DECODED + 1)  # the first token is known already
    return DECODED / (time.perf_counter() - began)
