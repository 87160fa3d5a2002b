"""Validate, then time the maps of a real pair: against eager torch, and against the rates at which
this card multiplies and copies.

    python build_scripts/gpu/timing.py --library build/native [--json FILE]
    python build_scripts/gpu/timing.py --library build/test-native --device cpu --tiny
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "build_scripts")]

from gpu.eager import EagerMap  # noqa: E402
from gpu.workloads import TINY, WORKLOADS, Workload  # noqa: E402
from trtllm_kvmap.artifact.fingerprint import Fingerprint  # noqa: E402
from trtllm_kvmap.artifact.group import HeadGroup  # noqa: E402
from trtllm_kvmap.artifact.kvmap import FLOAT8, KvMap  # noqa: E402
from trtllm_kvmap.mapper.contract import Span  # noqa: E402
from trtllm_kvmap.mapper.cuda import CudaMapper  # noqa: E402
from trtllm_kvmap.mapper.native import NAME  # noqa: E402
from trtllm_kvmap.mapper.pool import KvPool  # noqa: E402
from trtllm_kvmap.spec.layout import BlockTable  # noqa: E402
from trtllm_kvmap.spec.model import ModelSpec  # noqa: E402
from trtllm_kvmap.spec.rope import RopeParams  # noqa: E402
from trtllm_kvmap.spec.slices import FIELDS, Slice, nearest_depth  # noqa: E402

DTYPE = torch.bfloat16
SOURCE_BLOCK, TARGET_BLOCK = 32, 64
# Both sides round weights, un-rotated keys and the result to bf16 (2^-9 each, relative).
ALLOWED_DISTANCE = 1e-2
WARM_UP, FEWEST, MOST = 3, 5, 50
SECONDS_EACH = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True, help=f"the folder of {NAME}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try this script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.ops.load_library(str(options.library / NAME))
    device = torch.device(options.device)
    torch.manual_seed(1)
    ceilings = {
        "matmul_flops": matmul_rate(device, 64 if options.tiny else 8192),
        "copy_bytes": copy_rate(device, 2**16 if options.tiny else 2**30),
    }
    print(json.dumps(ceilings))
    findings: dict[str, Any] = {"ceilings": ceilings, "maps": []}
    # First the kernels' own choice everywhere: a kernel that has to be asked for, and has never run
    # on this card, may end the process.
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    for variant in ("auto", "hopper") if hopper else ("auto",):
        for workload in TINY if options.tiny else WORKLOADS:
            for row in measure(workload, variant, device, ceilings):
                print(json.dumps(row), flush=True)
                findings["maps"].append(row)
                if options.json:  # what is known survives a time limit
                    options.json.write_text(json.dumps(findings))
    return 0 if all(row["correct"] for row in findings["maps"]) else 1


def measure(
    workload: Workload, variant: str, device: torch.device, ceilings: dict[str, float]
) -> Iterator[dict[str, Any]]:
    lengths = workload.tokens_for(variant)
    if lengths:
        kvmap = make_map(workload)
        mapper, eager = CudaMapper(kvmap, variant), EagerMap(kvmap, device, DTYPE)
        for tokens in lengths:
            row = measure_at(tokens, workload, mapper, eager, device, ceilings)
            yield {"map": workload.name, "tokens": tokens, "variant": variant, **row}


def measure_at(
    tokens: int,
    workload: Workload,
    mapper: CudaMapper,
    eager: EagerMap,
    device: torch.device,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    pools = make_pools(workload, tokens, device)
    distance = distance_between(mapper, eager, *pools)
    ours = median_seconds(lambda: mapper.map_kv(*pools), device)
    theirs = median_seconds(lambda: eager.map_kv(*pools), device)
    flops, moved = workload.flops(tokens), workload.bytes_moved(tokens)
    floor = workload.floor_seconds(tokens, ceilings["matmul_flops"], ceilings["copy_bytes"])
    return {
        "correct": distance is not None and distance <= ALLOWED_DISTANCE,
        "distance_to_eager": distance,
        "median_ms": 1e3 * ours,
        "median_in_graph_ms": 1e3 * graphed_seconds(lambda: mapper.map_kv(*pools), device, ours),
        "eager_ms": 1e3 * theirs,
        "eager_over_ours": theirs / ours,
        "floor_ms": 1e3 * floor,
        "percent_of_floor_rate": 100 * floor / ours,
        "percent_of_matmul": 100 * flops / ours / ceilings["matmul_flops"],
        "percent_of_copy": 100 * moved / ours / ceilings["copy_bytes"],
    }


def make_map(workload: Workload) -> KvMap:
    """Random and centred. All layers share one matrix here; a packed map holds a copy for each."""
    w = workload
    source, target = (
        ModelSpec("timed", "qwen3", layers, 8 * w.heads, w.heads, w.head_dim, 1, 2**17, rope)
        for layers, rope in (
            (w.source_layers, RopeParams(theta=1e6, rotary_dim=w.head_dim)),
            (w.target_layers, RopeParams(theta=1e6, rotary_dim=w.head_dim)),
        )
    )
    width = w.slices * w.head_dim
    per_group = w.heads if w.scope in ("pooled", "copy") else 1
    weight = torch.randn(width, per_group * w.head_dim) / width**0.5
    scale = None
    if w.weight_bytes == 1:
        scale = weight.abs().amax(0) / torch.finfo(FLOAT8).max
        weight = (weight / scale).to(FLOAT8)
    bias = torch.randn(per_group * w.head_dim)
    groups = []
    for field in FIELDS:
        for layer in range(w.target_layers):
            for first in range(0, w.heads, per_group):
                heads = tuple(range(first, first + per_group))
                slices = read_slices(w, field, layer, first)
                learned = w.scope != "copy"
                groups.append(
                    HeadGroup(
                        field,
                        layer,
                        heads,
                        slices,
                        weight if learned else None,
                        bias if learned else None,
                        scale,
                    )
                )
    blank = Fingerprint("", "", "")
    return KvMap(source, target, blank, blank, w.scope, tuple(groups), fitted={})


def read_slices(w: Workload, field: Any, layer: int, head: int) -> tuple[Slice, ...]:
    near = nearest_depth(layer, w.target_layers, w.source_layers)
    if w.scope == "copy":
        return tuple(Slice("source", field, near, h) for h in range(w.heads))
    if w.scope == "slice":  # any of the cache's, the same for every run
        generator = torch.Generator().manual_seed(layer * w.heads + head)
        drawn = torch.randperm(w.source_layers * w.heads, generator=generator)[: w.slices]
        return tuple(Slice("source", field, i // w.heads, i % w.heads) for i in drawn.tolist())
    k = w.slices // w.heads if w.scope == "pooled" else w.slices
    first = min(max(near - k // 2, 0), w.source_layers - k)
    layers = range(first, first + k)
    heads = range(w.heads) if w.scope == "pooled" else (head,)
    return tuple(Slice("source", field, a, h) for a in layers for h in heads)


def make_pools(w: Workload, tokens: int, device: torch.device) -> tuple[KvPool, KvPool, Span]:
    """Shuffled blocks, every source number drawn, the target full of NaN."""
    pools, slots = [], []
    for layers, size in ((w.source_layers, SOURCE_BLOCK), (w.target_layers, TARGET_BLOCK)):
        blocks = -(-tokens // size)
        shape = blocks, layers, 2, w.heads, size, w.head_dim
        pool = torch.empty(shape, dtype=DTYPE, device=device)
        pools.append(pool)
        table = BlockTable(tuple(torch.randperm(blocks).tolist()), size)
        slots.append(torch.from_numpy(table.slot_mapping(0, tokens)).to(device))
    pools[0].normal_()
    pools[1].fill_(float("nan"))
    positions = torch.arange(tokens, device=device)
    span = Span(*slots, positions, source_length=tokens, target_length=tokens)
    return KvPool.from_trtllm(pools[0]), KvPool.from_trtllm(pools[1]), span


def distance_between(
    mapper: CudaMapper, eager: EagerMap, source: KvPool, target: KvPool, span: Span
) -> float | None:
    """The largest, over layers and fields, of |ours - eager| / |eager| in the Frobenius norm. None
    when a number was not written.
    """
    eager.map_kv(source, target, span)
    blocks, offsets = span.target_slots // TARGET_BLOCK, span.target_slots % TARGET_BLOCK
    views = (*target.keys, *target.values)
    wanted = [view[blocks, :, offsets].cpu() for view in views]
    for view in views:
        view.fill_(float("nan"))
    mapper.map_kv(source, target, span)
    distances = []
    for view, reference in zip(views, wanted, strict=True):
        there = reference.to(view.device).float()
        error = view[blocks, :, offsets].float() - there
        distances.append(float(error.norm() / there.norm()))
    return max(distances) if all(map(math.isfinite, distances)) else None


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, by device events; a CPU is timed by the clock."""
    for _ in range(WARM_UP):
        call()
    times: list[float] = []
    started = time.monotonic()
    while len(times) < FEWEST or (len(times) < MOST and time.monotonic() - started < SECONDS_EACH):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            call()
            times.append(time.perf_counter() - before)
    return statistics.median(times)


def graphed_seconds(call: Callable[[], object], device: torch.device, otherwise: float) -> float:
    """The same without what Python and the launches cost: a replay of the captured call. A CPU has
    no graphs.
    """
    if device.type != "cuda":
        return otherwise
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_seconds(graph.replay, device)


def matmul_rate(device: torch.device, size: int) -> float:
    """FLOP/s of torch's own bf16 product of two square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=DTYPE) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device)


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes/s, read and written, of a copy within the device's memory."""
    a = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / median_seconds(lambda: b.copy_(a), device)


if __name__ == "__main__":
    sys.exit(main())
