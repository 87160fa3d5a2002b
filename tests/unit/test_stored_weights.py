"""The fingerprint read from a model's files is the loaded model's, or the model is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_models import available_architectures, write_model
from safetensors.torch import load_file, save_file

from trtllm_kvmap.artifact import stored_weights
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import load_model, read_fingerprint, stored
from trtllm_kvmap.tiny import model_folder as tiny_folder

# Maps in use name their models by these numbers.
TINY_S_WEIGHTS = "03693bc9779fcd62d4ce81d7d49cf0b18f0afcc3e7be8812b462567ae6be2177"
EXTRA = tuple(name for name in ("phi3", "glm", "glm4") if name in transformers.CONFIG_MAPPING)


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, no model can be loaded."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    return lambda: monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Its one file of weights, changed."""
    path = folder / "model.safetensors"
    changed = {name: tensor.clone() for name, tensor in change(load_file(path)).items()}
    save_file(changed, path, {"format": "pt"})


def tie(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


def without_head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def test_the_digest_of_a_known_model_does_not_change() -> None:
    assert read_fingerprint(tiny_folder("tiny-s")).weights == TINY_S_WEIGHTS
    assert load_model(tiny_folder("tiny-s")).fingerprint.weights == TINY_S_WEIGHTS


@pytest.mark.parametrize("architecture", [*available_architectures(), *EXTRA])
def test_it_is_that_of_the_loaded_model(
    architecture: str, model_folder: Callable[..., Path], not_loaded: Callable[[], None]
) -> None:
    folder = model_folder(architecture)
    wanted = load_model(folder).fingerprint
    not_loaded()
    assert read_fingerprint(folder) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_of_shards_in_any_float_and_in_small_pieces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    not_loaded: Callable[[], None],
    tied: bool,
    dtype: torch.dtype,
) -> None:
    write_model(tmp_path / "whole")
    if tied:
        tie(tmp_path / "whole")
        rewrite(tmp_path / "whole", without_head)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=dtype)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    shutil.copy(tmp_path / "whole" / "tokenizer.json", tmp_path / "shards")
    shutil.copy(tmp_path / "whole" / "tokenizer_config.json", tmp_path / "shards")
    wanted = load_model(tmp_path / "shards").fingerprint
    largest: list[int] = []
    pieces = stored_weights._pieces

    def noted(tensor: Any, shape: tuple[int, ...]) -> Any:
        for piece in pieces(tensor, shape):
            largest.append(piece.numel())
            yield piece

    monkeypatch.setattr(stored_weights, "_pieces", noted)
    monkeypatch.setattr(stored_weights, "PIECE_BYTES", 1000)
    not_loaded()
    assert read_fingerprint(tmp_path / "shards") == wanted
    assert max(largest) <= 250


def test_one_changed_number_changes_it(tmp_path: Path, not_loaded: Callable[[], None]) -> None:
    def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state["model.norm.weight"][-1] += 1e-6
        return state

    write_model(tmp_path / "a")
    write_model(tmp_path / "b")
    rewrite(tmp_path / "b", change)
    not_loaded()
    first, second = read_fingerprint(tmp_path / "a"), read_fingerprint(tmp_path / "b")
    assert (first.config, first.tokenizer) == (second.config, second.tokenizer)
    assert first.weights != second.weights


def with_extra(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}


def without_prefix(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a base model alone is saved; loading puts the prefix there."""
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def head_alone(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: tensor for n, tensor in state.items() if n != "model.embed_tokens.weight"}


def other_head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "lm_head.weight": state["lm_head.weight"] + 1}


CASES: dict[str, tuple[bool, Callable[..., dict[str, torch.Tensor]], str]] = {
    "an unknown tensor": (False, with_extra, "inv_freq"),
    "renamed tensors": (False, without_prefix, "either in the files or in the model"),
    "a tied head that is stored, and another": (True, other_head, "lm_head.weight"),
    "a tied head instead of the embedding": (True, head_alone, "lm_head.weight"),
}


OF_NEWER = ("renamed tensors", "a tied head instead of the embedding")


@pytest.mark.parametrize("case", CASES)
def test_what_loading_would_decide_is_loaded(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    tied, change, why = CASES[case]
    if case in OF_NEWER and transformers.__version__.startswith("4."):
        pytest.skip(f"transformers {transformers.__version__} cannot load {case} at all")
    write_model(tmp_path / "model")
    if tied:
        tie(tmp_path / "model")
    rewrite(tmp_path / "model", change)
    wanted = load_model(tmp_path / "model").fingerprint
    assert read_fingerprint(tmp_path / "model") == wanted
    assert why in caplog.text
    assert "is loaded in float32" in caplog.text


@pytest.mark.parametrize("what", ["an adapter", "quantised weights", "another format"])
def test_files_that_do_not_say_what_is_loaded_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    loaded = load_model(folder)
    if what == "an adapter":
        (folder / "adapter_config.json").write_text("{}")
    elif what == "quantised weights":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setattr(stored, "load_model", lambda path: loaded)
    assert read_fingerprint(folder) == loaded.fingerprint
    assert "cannot be checked from their files" in caplog.text


def test_a_broken_file_is_no_fingerprint(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"(?i)incomplete|invalid|header"):
        read_fingerprint(tmp_path / "model")


def test_a_model_of_another_kind_is_refused_as_loading_refuses_it(tmp_path: Path) -> None:
    """Its text has a known architecture, but it is no language model by itself."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(hidden_size=32, num_attention_heads=4)
    )
    config.save_pretrained(tmp_path / "model")
    for read in (load_model, read_fingerprint):
        with pytest.raises(InputError, match=r"No model could be loaded.*LlavaConfig"):
            read(tmp_path / "model")
