"""What a request costs through a real Triton server (run it through bench.py).

One server over the tiny family, one thread per process, ways taken in turns in one run. Ratios of
times: medians over rounds. The map's weights are random, which costs the same as fitted ones.

- *through Triton to in process*: the same reads, maps and answers, several requests at a time
  through HTTP, one after the other in this process.
- *pipeline to target alone*, per prompt length: the source reads, its KV moves and is mapped, the
  target answers, against the same server's target reading the prompt itself. *warm*: the source
  had read all but the last turn of the conversation before. *cold*: it had read nothing.
- *routed*: one new prompt of each of several lengths, each going whichever way the speeds that were
  measured just before call sooner, against mapping all of them and mapping none.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: as in the server's processes

import numpy as np
import torch
from bench_handoff import map_between
from triton_server import TritonServer, version

from trtllm_kvmap.artifact.evidence import CONTROLS
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.evaluate.measure_speeds import measure_speeds
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.serve.repository import write_repository
from trtllm_kvmap.serve.settings import SPEEDS, ServeConfig
from trtllm_kvmap.serve.source import SourceReader
from trtllm_kvmap.serve.target import Job, TargetAnswerer
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import VOCABULARY

LENGTHS, TURN_TOKENS = (1024, 4000), 64
REQUEST_LENGTH, ROUNDS, REQUESTS, CONCURRENT, NEW_TOKENS = 512, 5, 16, 8, 8
CONFIG = ServeConfig()
ROUTED_LENGTHS = (48, 96, 192, 384, 768, 1536)
FIGURE = {"value": 0.9, "low": 0.8, "high": 1.0}
# Routing asks what a map's report vouches for; this map is random, and its report of no run.
EVIDENCE = {
    "config": {"metric": "nll", "N": CONFIG.repair_window, "context_tokens": {"longest": 4096}},
    "arms": {"source": {"nll": FIGURE}, "target": {"nll": {**FIGURE, "value": 0.5}}},
    "gap_recovered": FIGURE,
    "perplexity_ratio": FIGURE,
    "controls": dict.fromkeys(CONTROLS, "passed"),
}
NOT_SERVED = {"x-vsr-kv-mapper-id": "none"}  # the target reads the prompt itself


def bench_triton() -> dict[str, object]:
    """The figures of `bench.py triton`, see the module."""
    torch.set_num_threads(1)
    source, target = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    with tempfile.TemporaryDirectory() as folder:
        kvmap = Path(folder) / "s-to-m.kvmap.safetensors"
        mapped = map_between(source, target)
        named = {"config": {**EVIDENCE["config"], "map_digest": mapped.map_digest()}}
        mapped = mapped.with_evidence({**EVIDENCE, **named})
        mapped.save(kvmap)
        paths = str(model_folder("tiny-s")), str(model_folder("tiny-m"))
        write_repository(Path(folder) / "repository", kvmap, *paths, CONFIG)
        # kvmap_whole routes and kvmap_pipeline does not: both ways stand side by side.
        speeds = measure_speeds(
            KvBridge(mapped, source=source, target=target),
            source,
            ROUTED_LENGTHS,
            first_tokens=CONFIG.first_tokens,
            repair_window=CONFIG.repair_window,
        )
        speeds.save(Path(folder) / "repository" / "kvmap_whole" / SPEEDS)
        with TritonServer(Path(folder) / "repository", Path(folder) / "work") as server:
            return {
                "server": version(),
                "requests_per_second_through_triton_to_in_process": through_to_in_process(
                    server, source, target, kvmap
                ),
                "pipeline_to_target_alone": {str(n): to_target_alone(server, n) for n in LENGTHS},
                "routed": routed(server),
                "megabytes_of_process": megabytes_of_processes(server.repository),
                "rounds": ROUNDS,
                "requests": {
                    "tokens": REQUEST_LENGTH,
                    "number": REQUESTS,
                    "at_once": CONCURRENT,
                    "new_tokens": NEW_TOKENS,
                },
            }


def through_to_in_process(
    server: TritonServer, source: LoadedModel, target: LoadedModel, kvmap: Path
) -> float:
    """Requests per second through the server over those in process."""
    reader, answerer = SourceReader(source), TargetAnswerer(target, kvmap)
    job = Job(NEW_TOKENS, first_tokens=CONFIG.first_tokens, repair_window=CONFIG.repair_window)
    prompts = [prompt_of(REQUEST_LENGTH, seed) for seed in range(REQUESTS)]

    def in_process() -> None:
        for prompt in prompts:
            ids = target.tokenise(prompt)
            plan = plan_handoff(
                len(ids), first_tokens=job.first_tokens, repair_window=job.repair_window
            )
            read = reader.read(ids[: plan.mapped.stop])
            for event in answerer.answer(ids, job, read):
                require_applied(event.outcome.status)

    def through() -> None:
        bodies = [{"prompt": prompt, "max_tokens": NEW_TOKENS} for prompt in prompts]
        with ThreadPoolExecutor(CONCURRENT) as threads:
            for response in threads.map(server.ask, bodies):
                require_applied(response["kv_status"])

    return median_ratio(in_process, through)


def to_target_alone(server: TritonServer, length: int) -> dict[str, float]:
    """Time to one token through the pipeline over that of the target alone, cold and warm."""
    prompt, turns = prompt_of(length, 0), iter(range(1_000_000))

    def ask(prompt: str, conversation: str = "", **hints: str) -> str:
        body = {"prompt": prompt, "max_tokens": 1, "conversation": conversation}
        return str(server.ask(body, **hints)["kv_status"])

    def alone() -> float:
        return seconds(lambda: ask(prompt, **NOT_SERVED))

    def cold() -> float:
        return seconds(lambda: require_applied(ask(prompt)))

    def warm() -> float:
        conversation = f"{length}-{next(turns)}"
        earlier = prompt.split()[: -TURN_TOKENS - CONFIG.repair_window]
        require_applied(ask(" ".join(earlier), conversation))
        return seconds(lambda: require_applied(ask(prompt, conversation)))

    rounds = [(alone(), cold(), warm()) for _ in range(ROUNDS + 1)][1:]
    return {
        "cold": round(statistics.median(c / a for a, c, _ in rounds), 3),
        "warm": round(statistics.median(w / a for a, _, w in rounds), 3),
    }


def routed(server: TritonServer) -> dict[str, object]:
    """Time of a mix of prompts that are routed over that of mapping each, and over mapping none;
    and the lengths that were mapped.
    """
    seeds = iter(range(1_000, 1_000_000))
    chosen: list[str] = []

    def mix(ask: Callable[..., dict[str, object]], **hints: str) -> float:
        bodies = [{"prompt": prompt_of(n, next(seeds)), "max_tokens": 1} for n in ROUTED_LENGTHS]
        began = time.perf_counter()
        chosen[:] = [str(ask(body, **hints)["kv_status"]) for body in bodies]
        return time.perf_counter() - began

    def routing() -> tuple[float, list[int]]:
        taken = mix(server.infer)
        pairs = zip(ROUTED_LENGTHS, chosen, strict=True)
        return taken, [n for n, status in pairs if status == "applied"]

    rounds = [
        (routing(), mix(server.ask), mix(server.ask, **NOT_SERVED)) for _ in range(ROUNDS + 1)
    ][1:]
    return {
        "to_mapping_all": round(statistics.median(r[0] / a for r, a, _ in rounds), 3),
        "to_mapping_none": round(statistics.median(r[0] / n for r, _, n in rounds), 3),
        "lengths": ROUTED_LENGTHS,
        "mapped": rounds[-1][0][1],
    }


def megabytes_of_processes(repository: Path) -> dict[str, int]:
    """The memory of a process of each model by now; pages that several share count in parts."""
    taken: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_text(errors="replace").split("\0")
            for word in words:
                if word.startswith(f"{repository}/"):
                    model = Path(word).relative_to(repository).parts[0]
                    (kilobytes,) = re.findall(
                        r"\nPss: +(\d+)", (process / "smaps_rollup").read_text()
                    )
                    taken[model] = max(taken.get(model, 0), int(kilobytes) // 1000)
    return taken


def prompt_of(length: int, seed: int) -> str:
    words = np.random.default_rng(seed).choice(VOCABULARY[2:], length - 1)
    return " ".join(["<bos>", *words])


def require_applied(status: str) -> None:
    if status != "applied":
        raise RuntimeError(f"a request that was to be mapped came back {status}")


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def median_ratio(above: Callable[[], object], below: Callable[[], object]) -> float:
    """Median over rounds of the time of ``above`` over that of ``below``, after one to warm up."""
    rounds = [seconds(above) / seconds(below) for _ in range(ROUNDS + 1)][1:]
    return round(statistics.median(rounds), 3)
