"""The readers of published benchmarks ask, letter by letter, what the harness's own tasks ask."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from published_tasks import write_hub

from trtllm_kvmap.evaluate.tasks.choice import READERS
from trtllm_kvmap.evaluate.tasks.conversations import read_conversations
from trtllm_kvmap.evaluate.tasks.named import TaskConfig
from trtllm_kvmap.evaluate.tasks.published import task_records

# The harness's own files, in its folder of tasks.
UPSTREAM = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "arc": "arc/arc_challenge.yaml",
    "winogrande": "winogrande/default.yaml",
    "mmlu": "mmlu/default/mmlu_abstract_algebra.yaml",
    "coqa": "coqa/default.yaml",
}


@pytest.fixture
def asked(harness: Any, tmp_path: Path) -> Any:
    """``asked(task)``: the harness's own task over the hub's items, which lie in a file, and its
    requests in order.
    """
    from lm_eval.tasks import TaskManager

    def build(name: str) -> tuple[Any, list[Any]]:
        upstream = Path(harness.__file__).parent / "tasks" / UPSTREAM[name]
        local = {
            "include": str(upstream),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(write_hub(name, tmp_path))}},
            "training_split": None,
            "validation_split": None,
            "fewshot_split": None,
            "test_split": "test",
        }
        (tmp_path / f"local_{name}.yaml").write_text(json.dumps(local))
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        task = manager.load([f"local_{name}"])["tasks"][f"local_{name}"]
        task.build_all_requests()
        return task, task.instances

    return build


@pytest.mark.parametrize("name", READERS)
def test_the_same_text_is_handed_over_and_scored(asked: Any, name: str, tmp_path: Path) -> None:
    task, requests = asked(name)
    config = TaskConfig(name, str(tmp_path / f"{name}.json"))
    ours, labels = [], []
    for record in task_records(config):
        read = READERS[name](record)
        labels.append(read.label)
        for i, choice in enumerate(read.choices):
            given = f" {read.given[i]}" if read.given else ""
            ours.append((read.context + given, f" {choice}"[len(given) :]))
    assert ours == [request.args for request in requests]
    right = (
        [int(task.doc_to_text(doc)) for doc in task.test_docs()]
        if name == "winogrande"
        else [int(task.doc_to_target(doc)) for doc in task.test_docs()]
    )
    assert labels == right


def test_a_conversation_is_told_in_the_same_words(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The task's file imports measures that transformers 5 has no more; its words need none.
    for name in ("transformers.data.metrics", "transformers.data.metrics.squad_metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    task, requests = asked("coqa")

    class Pieces:  # keeps what it is given, piece by piece
        texts: list[str]

        def __init__(self) -> None:
            self.texts = []

        def __call__(self, text: str, **_: Any) -> Any:
            self.texts.append(text)
            return type("Encoded", (), {"input_ids": [len(self.texts)]})

    pieces = Pieces()
    read_conversations(TaskConfig("coqa", str(tmp_path / "coqa.json"), num_items=1), pieces)
    assert "".join(pieces.texts[:-1]) == requests[0].args[0]
    assert pieces.texts[-1] == f" {next(iter(task.doc_to_target(next(iter(task.test_docs())))))}"
