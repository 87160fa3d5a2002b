"""What a switch costs from hot standby, mapped at the switch, and read again (run it through
bench.py).

The floor of any switch is a chunk of 32 tokens that the target reads on a cache of its own at the
same length. All four take turns in one run; milliseconds are medians, ratios are medians of the
ratios of turns. The map pools every layer of tiny-s for tiny-m: the slowest kind there is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

import torch
from bench_handoff import map_between, random_cache

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.mirror import Mirror
from trtllm_kvmap.decode.session.overlap import read_mirrored
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.models import load_model
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder

LENGTHS = (256, 512, 1024, 2048, 4096)
REPAIR_WINDOW = 32
SWITCH_ROUNDS, DECODE_ROUNDS, OVERLAP_ROUNDS = 31, 5, 7
DECODED = 128  # tokens that the source decodes with a mirror behind it
OVERLAPPED = 4096


def bench_switch() -> dict[str, object]:
    """The figures of `bench.py switch`, see the module."""
    source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    bridge = KvBridge(map_between(source, target), source=source, target=target)
    found = {str(length): switch_at(bridge, length) for length in LENGTHS}
    names = next(iter(found.values()))
    return {
        **{name: {length: figures[name] for length, figures in found.items()} for name in names},
        "decode_with_mirror_to_without": {
            str(length): decode_ratio(bridge, length) for length in (256, 2048)
        },
        "overlapped_to_serial": overlap_ratio(bridge),
        "rounds": SWITCH_ROUNDS,
        "threads": torch.get_num_threads(),
    }


def switch_at(bridge: KvBridge, length: int) -> dict[str, float]:
    """Each way to let the target go on after ``length`` tokens, of which the source has read all
    but the last.
    """
    source, target = bridge.source, bridge.target
    ids = (torch.arange(length) % source.spec.vocab_size).tolist()
    read, own = random_cache(source, length - 1), random_cache(target, length)
    plan = plan_handoff(length, repair_window=REPAIR_WINDOW)
    mirror = Mirror(bridge)
    mirror.follow(read, ids)
    last, before = ids[-REPAIR_WINDOW:], length - REPAIR_WINDOW
    ways: dict[str, Callable[[], object]] = {
        "mirrored_ms": lambda: mirror.hand_over(read, ids, plan),
        "native_chunk_ms": lambda: prefill(target, last, fork(own, before), logits_to_keep=1),
        "map_at_switch_ms": lambda: bridge.hand_over(read, ids, plan),
        "prefill_ms": lambda: prefill(target, ids, logits_to_keep=1),
    }
    turns = take_turns(ways, SWITCH_ROUNDS)
    floor = turns["native_chunk_ms"]
    return {
        **{name: median(times) for name, times in turns.items()},
        "mirrored_to_native_chunk": ratio_of_turns(turns["mirrored_ms"], floor),
        "mirrored_to_map_at_switch": ratio_of_turns(
            turns["mirrored_ms"], turns["map_at_switch_ms"]
        ),
        "mirrored_to_prefill": ratio_of_turns(turns["mirrored_ms"], turns["prefill_ms"]),
    }


def decode_ratio(bridge: KvBridge, length: int) -> float:
    """What following costs while the source decodes, each block mapped when it has filled."""

    def decode(mirror: Mirror | None) -> None:
        ids = (torch.arange(length) % bridge.source.spec.vocab_size).tolist()
        cache = random_cache(bridge.source, length)
        if mirror is not None:
            mirror.follow(cache, ids)
        for _ in range(DECODED):
            ids.append(ids[-1])
            prefill(bridge.source, ids[-1:], cache, logits_to_keep=1)
            if mirror is not None and len(ids) % mirror.tokens_per_block == 0:
                mirror.follow(cache, ids)

    turns = take_turns(
        {"with": lambda: decode(Mirror(bridge)), "without": lambda: decode(None)}, DECODE_ROUNDS
    )
    return ratio_of_turns(turns["with"], turns["without"])


def overlap_ratio(bridge: KvBridge) -> dict[str, float]:
    """Reading and mapping a prompt in chunks, overlapped over one after the other; with one thread
    for each product and with all of them.
    """
    ids = (torch.arange(OVERLAPPED) % bridge.source.spec.vocab_size).tolist()

    def serial() -> None:
        mirror, cache = Mirror(bridge), None
        for stop in range(512, OVERLAPPED + 1, 512):
            cache = prefill(bridge.source, ids[stop - 512 : stop], cache, logits_to_keep=1).cache
            mirror.follow(cache, ids)

    found, threads = {}, torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        turns = take_turns(
            {
                "overlapped": lambda: read_mirrored(bridge.source, ids, Mirror(bridge)),
                "serial": serial,
            },
            OVERLAP_ROUNDS,
        )
        found[f"{count} threads"] = ratio_of_turns(turns["overlapped"], turns["serial"])
    torch.set_num_threads(threads)
    return found


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each of ``rounds`` turns, after one turn that is not counted. Within a turn
    the order is random: who runs after a long pass finds cold caches.
    """
    turns: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            began = time.perf_counter()
            ways[name]()
            turns[name].append(1e3 * (time.perf_counter() - began))
    return {name: times[1:] for name, times in turns.items()}


def ratio_of_turns(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))
