"""The floor checker on small trees of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build_scripts"))
from check_floors import PACKAGE, ROOT, complaints


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_package_keeps_its_floors() -> None:
    assert list(complaints(ROOT / PACKAGE)) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("spec/model.py", "from trtllm_kvmap.mapper.pool import KvPool", "only floors below"),
        ("fit/ridge.py", "from trtllm_kvmap.mapper import pool", "only floors below"),
        ("fit/ridge.py", "def f():\n    import trtllm_kvmap.evaluate.run", "only floors below"),
        ("fit/ridge.py", "from trtllm_kvmap import decode", "only floors below"),
        ("mapper/cpu.py", "import transformers", "may be imported only in models/"),
        ("mapper/cpu.py", "from tensorrt_llm.llmapi import LLM", "inject/trtllm/host.py"),
        ("mapper/cpu.py", "import tensorrt as trt", "may be imported only in engine/"),
        ("attic/thing.py", "x = 1", "has no floor"),
    ],
)
def test_a_broken_floor_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    found = list(complaints(tree(tmp_path, {file: text})))
    assert len(found) == 1
    assert file in found[0]
    assert said in found[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("fit/ridge.py", "from trtllm_kvmap.artifact.moments import Moments"),
        ("fit/ridge.py", "from trtllm_kvmap.fit.config import FitConfig"),
        ("models/load.py", "import transformers\nfrom trtllm_kvmap.artifact.fingerprint import x"),
        ("inject/hf_cache.py", "from transformers import DynamicCache"),
    ],
)
def test_what_is_allowed_is_quiet(tmp_path: Path, file: str, text: str) -> None:
    assert list(complaints(tree(tmp_path, {file: text}))) == []
