"""Whole runs of lm-evaluation-harness, by its own command line, against this package's report on
the same items: every arm, item by item.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.run import EvaluationConfig, evaluate
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder as tiny_folder
from trtllm_kvmap.tiny.documents import make_document

ITEMS, FIRST_TOKENS, REPAIR_WINDOW = 24, 2, 8
ARMS = {"target": "target", "source": "source", "mapped": f"mapped_repaired_{REPAIR_WINDOW}"}
ADAPTER = "trtllm_kvmap.evaluate.lm_eval_adapter"
CHOICE, SAID = "kvmap_choice", "kvmap_said"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, harness: Any) -> Path:
    """A folder of two tasks over the same documents: one of four choices, of different lengths, and
    the answer that is said.
    """
    folder = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(11)
    lines = []
    for index in range(ITEMS):
        document = make_document(rng, int(rng.integers(96, 300)), 8, 2)
        question = document.questions[index % 2]  # one step, two steps
        after = rng.permutation(["", " again", " again after", ""])
        endings = [name + words for name, words in zip(question.choices, after, strict=True)]
        record = {"ctx": f"{document.text} {question.stem}", "endings": endings}
        right = question.choices[question.label]
        lines.append(json.dumps({**record, "label": question.label, "name": right}) + "\n")
    data = folder / "hellaswag.jsonl"
    data.write_text("".join(lines))
    both = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{ctx}}",
    }
    choice = {
        "task": CHOICE,
        "output_type": "multiple_choice",
        "doc_to_choice": "endings",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    said = {
        "task": SAID,
        "output_type": "generate_until",
        "doc_to_target": "{{name}}",
        "generation_kwargs": {"until": [" again"], "max_gen_toks": 1, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (choice, said):  # JSON is YAML
        (folder / f"{task['task']}.yaml").write_text(json.dumps(both | task))
    return folder


@pytest.fixture(scope="module", params=ARMS)
def run(
    request: pytest.FixtureRequest, tasks: Path, tiny_map: Path, tmp_path_factory: Any
) -> tuple[str, dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """One run for each arm: its name, the harness's samples by task, and its figures."""
    arm, out = request.param, tmp_path_factory.mktemp("out")
    given = {
        "kvmap": tiny_map,
        "source": tiny_folder("tiny-s"),
        "target": tiny_folder("tiny-m"),
        "arm": arm,
        "first_tokens": FIRST_TOKENS,
        "repair_window": REPAIR_WINDOW,
    }
    command = [
        *(sys.executable, "-m", ADAPTER, "--model", "kvmap", "--tasks", f"{CHOICE},{SAID}"),
        *("--include_path", str(tasks), "--log_samples", "--output_path", str(out)),
        *("--model_args", ",".join(f"{name}={value}" for name, value in given.items())),
    ]
    cache = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "cache")}
    done = subprocess.run(
        command, env={**os.environ, **cache}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert CHOICE in done.stdout
    samples = {
        task: sorted(
            map(json.loads, next(out.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()),
            key=lambda sample: sample["doc_id"],
        )
        for task in (CHOICE, SAID)
    }
    return arm, samples, json.loads(next(out.rglob("results_*.json")).read_text())["results"]


@pytest.fixture(scope="module")
def reports(tasks: Path, tiny_map: Path) -> dict[str, Report]:
    """This package's own reports on the file: in accuracy, in normalised accuracy, and in loss."""
    models = [load_model(tiny_folder(name)) for name in ("tiny-s", "tiny-m")]
    config = TaskConfig("hellaswag", str(tasks / "hellaswag.jsonl"), num_items=ITEMS)
    items = read_items(config, models[1].tokenizer)
    kvmap = KvMap.load(tiny_map, allow_unproven=True)

    def report(**options: Any) -> Report:
        hand_over = {"first_tokens": FIRST_TOKENS, "repair_window": REPAIR_WINDOW}
        return evaluate(
            kvmap, *models, items, EvaluationConfig(resamples=10, **hand_over, **options)
        )

    return {
        "acc": report(),
        "acc_norm": report(length_normalised=True),
        "nll": report(metric="nll"),
    }


def test_every_item_is_judged_alike(run: Any, reports: dict[str, Report]) -> None:
    arm, samples, figures = run
    for metric in ("acc", "acc_norm"):
        ours = reports[metric].contexts["metric"][ARMS[arm]]
        assert [sample[metric] for sample in samples[CHOICE]] == ours
        assert figures[CHOICE][f"{metric},none"] == pytest.approx(
            reports[metric].arms[ARMS[arm]]["accuracy"]["value"]
        )


def test_every_right_choice_has_the_same_loss(run: Any, reports: dict[str, Report]) -> None:
    arm, samples, _ = run
    ours = reports["nll"].contexts["metric"][ARMS[arm]]  # per token; words are tokens here
    for sample, loss in zip(samples[CHOICE], ours, strict=True):
        doc = sample["doc"]
        total, _ = sample["filtered_resps"][doc["label"]]
        words = len(doc["endings"][doc["label"]].split())
        assert float(total) == pytest.approx(-loss * words, abs=2e-3)


def test_what_is_said_is_the_likeliest(run: Any) -> None:
    _, samples, figures = run
    right = 0
    for said, chosen in zip(samples[SAID], samples[CHOICE], strict=True):
        (text,) = said["filtered_resps"]
        right += text.strip() == said["doc"]["name"]
        best = [choice.split()[0] for choice in said["doc"]["endings"]]
        for name, (_, greedy) in zip(best, chosen["filtered_resps"], strict=True):
            assert str(greedy) != "True" or text.strip() == name
    assert figures[SAID]["exact_match,none"] == pytest.approx(right / ITEMS)


def test_the_arms_are_told_apart(reports: dict[str, Report]) -> None:
    """Else equal figures would prove nothing."""
    for report in reports.values():
        rows = {tuple(report.contexts["metric"][arm]) for arm in ARMS.values()}
        assert len(rows) == len(ARMS)
    assert reports["acc"].contexts != reports["acc_norm"].contexts
