"""The conformance table on a device, on every kernel variant; the whole pool is compared.

python build_scripts/gpu/conformance.py --library build/native [--few] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("conformance", "cpp"))]

from case_build import Built, build, views_of  # noqa: E402
from cases import CASES, SECONDS, Case  # noqa: E402
from expected import ABSOLUTE, expect  # noqa: E402
from half_cases import with_dtype, with_heads_of_64  # noqa: E402

from trtllm_kvmap.mapper.contract import Span  # noqa: E402
from trtllm_kvmap.mapper.cuda import CudaMapper, compute_dtype  # noqa: E402
from trtllm_kvmap.mapper.native import NAME  # noqa: E402
from trtllm_kvmap.mapper.pool import KvPool  # noqa: E402

# What rounding weights and un-rotated keys to half precision may add, for numbers of about one.
DECLARED = {torch.float32: 0.0, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
FEW = 6
# Those second terms that a kernel sees: weights in fp8-e4m3.
TABLE = (*CASES, *(case for case in SECONDS if case.second == "float8"))
# One for each path of a call: split K, row tiles of a long span, copies, fp8 weights.
IN_GRAPHS = ("bfloat16-to-bfloat16", "long-span-in-blocks", "copies-and-slices", "float8-weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True, help=f"the folder of {NAME}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--few", action="store_true", help=f"every {FEW}th case only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.ops.load_library(str(options.library / NAME))
    device = torch.device(options.device)
    failures, runs = [], 0
    graphs = {}
    for name in IN_GRAPHS if device.type == "cuda" else ():
        graphs[name] = replay_complaint(name, device)
        if graphs[name]:
            failures.append({"case": name, "run": "CUDA graph", "complaint": graphs[name]})
    cases = TABLE[:: FEW if options.few else 1]
    # A kernel that has never run on this card may spoil the process: it comes last.
    for attempts in (attempts_of_every_card, attempts_of_hopper):
        for case in cases:
            for title, complaint in attempts(case, device):
                runs += 1
                if complaint:
                    failures.append({"case": case.id, "run": title, "complaint": complaint})
                    print(f"{case.id} ({title}): {complaint}")
    findings = {"runs": runs, "failures": failures, "largest_errors": LARGEST, "graphs": graphs}
    print(f"{runs} runs, {len(failures)} failures")
    if options.json:
        options.json.write_text(json.dumps(findings))
    return 1 if failures else 0


LARGEST: dict[str, float] = {}


def attempts_of_every_card(case: Case, device: torch.device) -> Iterator[tuple[str, str]]:
    """(what was run, what was wrong with it or nothing): the case as it is, with indices on the
    host and on the device; in bf16 on every kernel of tensor cores, indices on the device.
    """
    for where in ("host", "device"):
        yield f"as it is, indices on the {where}", complaint_of(case, "auto", where, device)
    half = with_dtype(case, "bfloat16")
    for variant in ("wide", "narrow", "small_t"):
        yield variant, complaint_of(half, variant, "device", device)


def attempts_of_hopper(case: Case, device: torch.device) -> Iterator[tuple[str, str]]:
    """On the kernel of wgmma and TMA: bf16 products, head sizes of whole 64 (the target's too, for
    its own slices). A CPU has the formula only, which takes any variant's name.
    """
    if device.type != "cpu" and torch.cuda.get_device_capability(device) != (9, 0):
        return
    case = with_heads_of_64(with_dtype(case, "bfloat16"))
    sizes = case.source.head_dim, case.target.head_dim
    if case.target.dtype != "float16" and all(size % 64 == 0 for size in sizes):
        yield "hopper", complaint_of(case, "hopper", "device", device)


def complaint_of(case: Case, variant: str, where: str, device: torch.device) -> str:
    built = build(case)
    moved = move(case, built, device)
    before = raw(moved.target_memory)
    span = moved.span if where == "host" else span_on(device, moved.span)
    try:
        CudaMapper(built.kvmap, variant).map_kv(moved.source, moved.target, span)
        return compare(case, moved, expect(case, built), before)
    except Exception as error:  # a report of everything that fails, not of the first
        return f"{type(error).__name__}: {error}"


def move(case: Case, built: Built, device: torch.device) -> Built:
    """The pools copied to ``device``, fresh each time; the target as it was poisoned."""
    memories = built.source_memory.clone().to(device), built.target_memory.clone().to(device)
    pools = [
        KvPool(*views_of(side, case, memory), side.key_scale, side.value_scale)
        for side, memory in zip((case.source, case.target), memories, strict=True)
    ]
    return replace(
        built,
        source=pools[0],
        target=pools[1],
        source_memory=memories[0],
        target_memory=memories[1],
    )


def span_on(device: torch.device, span: Span) -> Span:
    ids = None if span.token_ids is None else span.token_ids.to(device)
    return replace(
        span,
        source_slots=span.source_slots.to(device),
        target_slots=span.target_slots.to(device),
        positions=span.positions.to(device),
        token_ids=ids,
    )


def compare(case: Case, moved: Built, expected: Any, before: torch.Tensor) -> str:
    after = raw(moved.target_memory)
    if not torch.equal(after[~expected.written], before[~expected.written]):
        return "another slot changed"
    found = moved.target_memory.cpu().double()[expected.written]
    wanted = expected.values[expected.written]
    if case.verbatim:
        same = torch.equal(found, wanted.to(moved.target.dtype).double())
        return "" if same else "a copy lost bits"
    copied = all(group.weight is None for group in moved.kvmap.groups)
    declared = 0.0 if copied else DECLARED[compute_dtype(moved.target)]
    error = (found - wanted).abs()
    allowed = ABSOLUTE[case.target.dtype] + declared
    allowed = allowed + wanted.abs() * (torch.finfo(moved.target.dtype).eps + declared)
    if error.numel():
        ratio = float((error / allowed).max())
        LARGEST[case.id] = max(LARGEST.get(case.id, 0.0), ratio)
        if not ratio <= 1.0:  # NaN as well
            return f"off by {ratio:.3g} times what is allowed"
    return ""


def replay_complaint(name: str, device: torch.device) -> str:
    """A call captured in a CUDA graph writes, when replayed, what a plain call writes."""
    case = with_dtype(next(case for case in TABLE if case.id == name), "bfloat16")
    built = build(case)
    plain, captured = move(case, built, device), move(case, built, device)
    span = span_on(device, built.span)
    mapper = CudaMapper(built.kvmap)
    mapper.map_kv(plain.source, plain.target, span)
    poisoned = captured.target_memory.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mapper.map_kv(captured.source, captured.target, span)
    captured.target_memory.copy_(poisoned)
    graph.replay()
    torch.cuda.synchronize()
    same = torch.equal(raw(captured.target_memory), raw(plain.target_memory))
    return "" if same else "a replay wrote other bytes than a plain call"


def raw(memory: torch.Tensor) -> torch.Tensor:
    return memory.cpu().view(torch.uint8).view(memory.numel(), -1).clone()


if __name__ == "__main__":
    sys.exit(main())
