"""A user's mistake ends with one clear sentence and status 2; nothing is written, whole or half."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from trtllm_kvmap.artifact.container import HEADER_KEY
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.tiny.documents import VOCABULARY

Folder = Callable[..., Path]
PROMPT = " ".join(["<bos>", *["after anna ben near"] * 20])


def complaint(*arguments: object) -> str:
    """The one sentence on standard error, in one line."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def pair(model_folder: Folder) -> tuple[Path, Path]:
    return model_folder("qwen3", seed=1), model_folder("qwen3", layers=3, seed=2)


@pytest.fixture(scope="module")
def kvmap(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": PROMPT}) + "\n" for _ in range(3)))
    moments, out = folder / "m.moments.safetensors", folder / "m.kvmap.safetensors"
    for arguments in (
        ("calibrate", *pair, "--text", text, "--out", moments),
        ("fit", moments, "--out", out, "--n", 2),
    ):
        assert CliRunner().invoke(app, [str(a) for a in arguments]).exit_code == 0
    return out


def generate(kvmap: Path, source: object, target: object, prompt: str = PROMPT) -> str:
    return complaint(
        *("generate", kvmap, "--source", source, "--target", target, "--allow-unproven"),
        *("--prompt", prompt),
    )


def test_a_truncated_map(kvmap: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "short.kvmap.safetensors"
    broken.write_bytes(kvmap.read_bytes()[:-100])
    assert "not a whole safetensors file" in generate(broken, *pair)


def test_an_edited_map(kvmap: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    edited = tmp_path / "edited.kvmap.safetensors"
    data = bytearray(kvmap.read_bytes())
    data[-3] ^= 1
    edited.write_bytes(data)
    assert "does not match its digest" in generate(edited, *pair)


def test_a_map_of_another_version(kvmap: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "version.kvmap.safetensors"
    with safe_open(kvmap, framework="pt") as file:
        header = json.loads(file.metadata()[HEADER_KEY])
    header["version"] = 3
    save_file(load_file(kvmap), other, metadata={HEADER_KEY: json.dumps(header)})
    assert "format version 3; this package reads versions 1 to 2" in generate(other, *pair)


def test_a_map_with_nan(kvmap: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    loaded = KvMap.load(kvmap, allow_unproven=True)
    next(g.weight for g in loaded.groups if g.weight is not None)[0, 0] = float("nan")
    path = tmp_path / "nan.kvmap.safetensors"
    loaded.save(path)
    assert "NaN or infinity" in generate(path, *pair)


def test_moments_given_for_a_map(kvmap: Path, pair: tuple[Path, Path]) -> None:
    moments = kvmap.with_name("m.moments.safetensors")
    assert "is a 'moments' file; a 'kvmap' file is needed" in generate(moments, *pair)


def test_a_map_without_evidence(kvmap: Path, pair: tuple[Path, Path]) -> None:
    said = complaint(
        *("generate", kvmap, "--source", pair[0], "--target", pair[1], "--prompt", PROMPT)
    )
    assert "carries no evidence" in said
    assert said.count("--allow-unproven") == 1


def test_one_changed_weight(kvmap: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(pair[1], changed)
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1e-3
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    assert "another target model: weights differ" in generate(kvmap, pair[0], changed)


def test_another_tokenizer(kvmap: Path, pair: tuple[Path, Path], model_folder: Folder) -> None:
    other = model_folder("qwen3", layers=3, seed=2, words=VOCABULARY[:2] + VOCABULARY[:1:-1])
    assert "different tokenizers" in generate(kvmap, pair[0], other)


def test_another_rope(kvmap: Path, pair: tuple[Path, Path], model_folder: Folder) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    other = model_folder("qwen3", layers=3, seed=2, rope=rope)
    assert "another target model: config differ" in generate(kvmap, pair[0], other)


def test_a_prompt_longer_than_the_limit(kvmap: Path, pair: tuple[Path, Path]) -> None:
    assert "512" in generate(kvmap, *pair, prompt=" ".join(["anna"] * 600))


def test_an_empty_prompt(kvmap: Path, pair: tuple[Path, Path]) -> None:
    assert "either --prompt TEXT or --prompt-file FILE" in generate(kvmap, *pair, prompt="")


def test_a_word_the_tokenizer_lacks(kvmap: Path, pair: tuple[Path, Path]) -> None:
    assert "zebra" in generate(kvmap, *pair, prompt="<bos> zebra")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"text": "after anna"\n', "line 1, is not JSON"),
        ('{"words": "after anna"}\n', "needs an object with a string `text`"),
        ('{"text": "anna ben"}\n', "has 2 tokens"),
        ('{"token_ids": [1, 2, 3, 4, 5, 6, 99999]}\n', "99999"),
    ],
)
def test_text_no_map_can_be_learned_from(
    pair: tuple[Path, Path], tmp_path: Path, content: str, said: str
) -> None:
    text, out = tmp_path / "text.jsonl", tmp_path / "none.moments.safetensors"
    text.write_text(content)
    assert said in complaint("calibrate", *pair, "--text", text, "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jsonl"]


def test_a_folder_that_is_no_model(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    said = complaint("calibrate", tmp_path, pair[1], "--estimate")
    assert "No model could be loaded" in said


def test_a_model_with_windows(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    windowed = tmp_path / "windowed"
    shutil.copytree(pair[1], windowed)
    config: dict[str, Any] = json.loads((windowed / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    config.pop("layer_types", None)
    (windowed / "config.json").write_text(json.dumps(config))
    said = complaint("doctor", "--source", pair[0], "--target", windowed)
    assert "sliding-window attention" in said


def test_a_model_folder_that_does_not_exist(pair: tuple[Path, Path]) -> None:
    said = complaint("doctor", "--source", "/no/such/model", "--target", pair[1])
    assert "There is no such folder" in said


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    kvmap: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    moments, text = kvmap.with_name("m.moments.safetensors"), kvmap.with_name("text.jsonl")
    (tmp_path / "file").write_text("kept")
    for out, said in ((tmp_path / "file" / "x", "cannot be written"), (tmp_path, "is a folder")):
        assert said in complaint("calibrate", *pair, "--text", text, "--out", out)
        assert said in complaint("fit", moments, "--out", out, "--n", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_read_is_not_overwritten_by_what_is_written(
    kvmap: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    moments, text = kvmap.with_name("m.moments.safetensors"), kvmap.with_name("text.jsonl")
    before = [path.read_bytes() for path in (kvmap, moments, text)]
    models, page = ("--source", pair[0], "--target", pair[1]), tmp_path / "page"
    for arguments in (
        ("calibrate", *pair, "--text", text, "--out", text),
        ("fit", moments, "--out", moments, "--n", 2),
        ("evaluate", kvmap, *models, "--task", "text", "--data", text, "--json", text),
        ("evaluate", kvmap, *models, "--html", kvmap),
    ):
        assert "which is read" in complaint(*arguments)
    said = complaint("evaluate", kvmap, *models, "--html", page, "--markdown", page)
    assert "--html and --markdown would both write" in said
    assert [path.read_bytes() for path in (kvmap, moments, text)] == before


def test_an_estimate_for_a_negative_number_of_tokens(pair: tuple[Path, Path]) -> None:
    said = complaint("calibrate", *pair, "--estimate", "--estimate-tokens", "-5")
    assert "at least 1, got -5" in said


def test_head_scope_between_unequal_heads(
    pair: tuple[Path, Path], model_folder: Folder, tmp_path: Path
) -> None:
    text, moments = tmp_path / "text.jsonl", tmp_path / "x.moments.safetensors"
    text.write_text(json.dumps({"text": PROMPT}) + "\n")
    wide = model_folder("qwen3", kv_heads=1, head_dim=32, seed=5)
    arguments = ("calibrate", pair[0], wide, "--text", text, "--out", moments)
    assert CliRunner().invoke(app, [str(a) for a in arguments]).exit_code == 0
    out = tmp_path / "x.kvmap.safetensors"
    said = complaint("fit", moments, "--out", out, "--scope", "head")
    assert "slice" in said
    assert not out.exists()


def test_an_unknown_scope_lists_the_known_ones(kvmap: Path, tmp_path: Path) -> None:
    moments, out = kvmap.with_name("m.moments.safetensors"), tmp_path / "out"
    said = complaint("fit", moments, "--out", out, "--scope", "heads")
    assert "copy, head, pooled, slice" in said


def test_odd_shapes_are_refused_when_a_map_is_read(kvmap: Path, tmp_path: Path) -> None:
    loaded = KvMap.load(kvmap, allow_unproven=True)
    learned = next(group for group in loaded.groups if group.weight is not None)
    object.__setattr__(learned, "weight", torch.zeros(3, 3))
    path = tmp_path / "odd.kvmap.safetensors"
    loaded.save(path)
    assert "needs a weight of" in complaint("inspect", path)
