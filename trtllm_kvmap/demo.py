"""The whole way once: calibrate, fit, hand over, generate, evaluate, on the tiny family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import require_writable, write_text
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.latency import measure_latency
from trtllm_kvmap.evaluate.report.markdown import markdown
from trtllm_kvmap.evaluate.report.page import html
from trtllm_kvmap.evaluate.report.report import Report, evidence
from trtllm_kvmap.evaluate.run import EvaluationConfig, evaluate
from trtllm_kvmap.evaluate.select import select
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import PAIRS, model_folder

# Documents of one seed are never those of another: fit, choice and report see different ones.
CALIBRATION_SEED, SELECTION_SEED, REPORT_SEED = 1, 2, 3
CALIBRATION_ITEMS, SELECTION_ITEMS, REPORT_ITEMS = 60, 24, 60
# Heads that read keys and values, from the cheapest kind of map to the best.
GRIDS = (
    FitGrid(scope=("copy",)),
    FitGrid(scope=("head", "pooled"), k=(3,), ridge=(1e-6,), fields="both"),
    FitGrid(scope=("slice",), n=(4, 8, 12), ridge=(1e-6,), fields="both"),
)
JUDGED = EvaluationConfig(first_tokens=4, repair_window=32)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Told:
    """One question about one document, and what each of three answered."""

    question: str
    right: str
    source: str
    target: str
    mapped: str


@dataclass(frozen=True, slots=True)
class PairDemo:
    """What the demo made of one pair: the report, an example, and the files it wrote."""

    report: Report
    told: list[Told]
    files: list[Path]


def run_demo(out: Path, on_progress: Progress) -> list[PairDemo]:
    """Both pairs, each into ``out``/<source>-to-<target>/. ``on_progress(stage, done, total)``."""
    return [run_pair(*pair, out, on_progress) for pair in PAIRS]


def run_pair(source_name: str, target_name: str, out: Path, on_progress: Progress) -> PairDemo:
    """Calibrate, choose a map, judge it on held-out documents, and let it answer."""
    pair = f"{source_name}-to-{target_name}"
    folder = out / pair
    require_writable(folder / "report.json")
    source, target = load_model(model_folder(source_name)), load_model(model_folder(target_name))

    def stage(name: str) -> Callable[[int, int], None]:
        return lambda done, total: on_progress(f"{pair}: {name}", done, total)

    texts = tiny_items(target, CALIBRATION_ITEMS, CALIBRATION_SEED)
    moments = calibrate(
        source,
        target,
        [item.context for item in texts],
        CalibrationConfig(joint=True, weighting="attention"),
        folder / f"{pair}.moments.safetensors",
        continuations=[asked(item) for item in texts],
        on_document=stage("calibrate"),
    )
    chosen, _ = select(
        moments,
        [candidate for grid in GRIDS for candidate in grid.candidates()],
        source,
        target,
        tiny_items(target, SELECTION_ITEMS, SELECTION_SEED),
        JUDGED,
        on_candidate=stage("choose"),
    )
    task = TaskConfig(num_items=REPORT_ITEMS, seed=REPORT_SEED)
    items = read_items(task, target.tokenizer)
    report = evaluate(chosen, source, target, items, JUDGED, on_item=stage("evaluate"), task=task)
    bridge = KvBridge(chosen, source=source, target=target)
    report = replace(report, latency=measure_latency(bridge, source, items, JUDGED))
    proven = chosen.with_evidence(evidence(report))
    map_file = folder / f"{pair}.kvmap.safetensors"
    proven.save(map_file)
    report.save(folder / "report.json")
    write_text(folder / "report.html", html(report))
    write_text(folder / "report.md", markdown(report))
    told = tell(KvMap.load(map_file), source, target, items[0])
    return PairDemo(report, told, sorted(folder.iterdir()))


def tiny_items(loaded: LoadedModel, count: int, seed: int) -> list[Item]:
    """``count`` documents of 256 to 1,024 tokens with 6 questions each, those of ``seed``."""
    return read_items(TaskConfig(num_items=count, seed=seed), loaded.tokenizer)


def asked(item: Item) -> list[list[int]]:
    """What the target reads after a document that calibrates: its questions with their answers,
    one after another. Where it looks then says which tokens a map must get right.
    """
    return [[t for q in item.questions for t in (*q.stem, *q.choices[q.label])]]


def tell(kvmap: KvMap, source: LoadedModel, target: LoadedModel, item: Item) -> list[Told]:
    """What source, target and mapped target answer to the questions of ``item``."""
    bridge = KvBridge(kvmap, source=source, target=target)
    told = []
    for question in item.questions:
        prompt = [*item.context, *question.stem]
        plan = plan_handoff(
            len(prompt), first_tokens=JUDGED.first_tokens, repair_window=JUDGED.repair_window
        )
        alone = [prefill(model, prompt, logits_to_keep=1) for model in (source, target)]
        handoff = bridge.hand_over(alone[0].cache, prompt, plan)
        answers = [
            generate(source, alone[0].cache, alone[0].logits, 1),
            generate(target, alone[1].cache, alone[1].logits, 1),
            generate(target, handoff.cache, handoff.logits, 1),
        ]
        right = question.choices[question.label]
        told.append(Told(*(in_words(target, ids) for ids in (question.stem, right, *answers))))
    return told


def in_words(loaded: LoadedModel, token_ids: Sequence[int]) -> str:
    tokenizer: Any = loaded.tokenizer
    return str(tokenizer.decode(list(token_ids)))
