"""What models/ reads off a configuration, and what tells two models apart."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import http_backoff
from random_models import available_architectures, write_model

from trtllm_kvmap.errors import InputError, KvMapError, MismatchError
from trtllm_kvmap.models import (
    describe_model,
    load,
    load_model,
    quiet_loading,
    read_spec,
    require_same_tokens,
)
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import VOCABULARY


@pytest.mark.parametrize("architecture", available_architectures())
def test_the_spec_is_the_shape_of_the_cache(architecture: str, random_model: Callable) -> None:
    loaded = random_model(architecture, layers=3, heads=4, kv_heads=2, head_dim=32)
    assert loaded.spec.architecture == architecture
    assert loaded.spec.kv_shape == (3, 2, 32)
    assert (loaded.spec.num_heads, loaded.spec.vocab_size) == (4, len(VOCABULARY))
    assert loaded.spec.max_positions == 512


def test_dynamic_rope_allows_what_its_factor_stretches(random_model: Callable) -> None:
    rope = {"rope_type": "dynamic", "factor": 3.0}
    spec = random_model("llama", max_positions=32, rope=rope).spec
    assert (spec.max_positions, spec.rope.original_length) == (96, 32)


def test_one_word_is_one_token(random_model: Callable) -> None:
    ids = random_model().tokenizer("<bos> anna near").input_ids
    assert ids == [VOCABULARY.index(word) for word in ("<bos>", "anna", "near")]


def test_tokenizer_digest_tells_vocabularies_apart(
    random_model: Callable, model_folder: Callable
) -> None:
    swapped = [*VOCABULARY[:-2], VOCABULARY[-1], VOCABULARY[-2]]
    here, there = random_model(), random_model(words=swapped)
    assert here.fingerprint.weights == there.fingerprint.weights
    require_same_tokens(here, random_model(seed=1))
    with pytest.raises(MismatchError, match="different tokenizers"):
        require_same_tokens(here, there)


def test_one_changed_weight_changes_the_fingerprint(tmp_path: Path, random_model: Callable) -> None:
    write_model(tmp_path / "copy")
    changed = load_model(tmp_path / "copy")
    with torch.no_grad():
        changed.model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-6
    with pytest.raises(MismatchError, match=r"another source model: weights differ"):
        random_model().fingerprint.require(changed.fingerprint, "source")


def test_another_rope_changes_the_fingerprint(random_model: Callable) -> None:
    other = random_model(rope={"rope_theta": 20000.0})
    assert other.fingerprint.weights == random_model().fingerprint.weights
    assert other.fingerprint.config != random_model().fingerprint.config


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No model could be loaded from .* Give a folder"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": "x"}, "could be loaded .*num_hidden_layers"),
        ({"dtype": "foo"}, "could be loaded .*foo"),
        ({"num_attention_heads": 0}, "could be loaded .*ZeroDivisionError"),
        ({"hidden_size": 17}, "could be loaded"),
        ({"model_type": "t5"}, "architecture 't5' .* is not supported"),
        ("tokenizer.json", "The tokenizer of .* cannot be read .* give a folder"),
    ],
)
def test_files_that_hold_anything_are_a_sentence(
    changed: dict[str, object] | str, said: str, tmp_path: Path
) -> None:
    """transformers raises KeyError, AttributeError and errors of its own."""
    copy = tmp_path / "model"
    shutil.copytree(model_folder("tiny-s"), copy)
    if isinstance(changed, str):
        (copy / changed).write_text("{}")
    else:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(KvMapError, match=said):
        load_model(copy)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("./no", "There is no such folder"),
        ("../no", "There is no such folder"),
        ("/no", "There is no such folder"),
        ("~/no", "There is no such folder"),
        ("far/down/no", "There is no such folder"),
        ("org/name/", "There is no such folder"),
        ("here/no", "There is no 'no' in the folder 'here'"),
        ("here", "There is no config.json in this folder"),
        ("here/file", "This is a file"),
    ],
)
def test_no_hub_is_asked_for_what_can_only_be_a_path(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("{}")
    asked: list[str] = []

    def offline(name: str) -> None:
        asked.append(name)
        raise OSError("We are offline.\nSee elsewhere.")

    monkeypatch.setattr(load.AutoConfig, "from_pretrained", offline)
    for read in (read_spec, describe_model, load_model):
        with pytest.raises(InputError, match=rf"from '{given}': {said}\. Give a folder"):
            read(given)
    assert not asked
    for name in ("name", "org/name", "here-not/no"):
        with pytest.raises(InputError, match=rf"from '{name}': We are offline\. Give a folder"):
            read_spec(name)
    assert asked == ["name", "org/name", "here-not/no"]


def test_the_hub_says_once_that_it_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    """huggingface_hub warns of every attempt; quiet_loading leaves the error that ends them."""
    quiet_loading()
    logger = logging.getLogger(http_backoff.__module__)
    logger.warning("Retrying in 8s")
    logger.error("kept")
    assert [record.message for record in caplog.records if record.name == logger.name] == ["kept"]


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "mistral")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 64}))
    with pytest.raises(MismatchError, match="sliding-window attention"):
        load_model(tmp_path)


def test_attention_of_a_random_model_is_not_uniform(random_model: Callable) -> None:
    """A test of transfer on uniform attention would pass whatever the keys are."""
    loaded = random_model("llama")
    loaded.model.set_attn_implementation("eager")
    try:
        out = loaded.model(torch.arange(2, 34).unsqueeze(0), output_attentions=True)
    finally:
        loaded.model.set_attn_implementation("sdpa")
    last_row = out.attentions[1][0, :, -1]
    assert bool((last_row.amax(-1) > 2.5 / 32).all())


def test_two_seeds_are_two_models(random_model: Callable) -> None:
    first, again, other = random_model(seed=0), random_model(seed=0), random_model(seed=1)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint.config == other.fingerprint.config
    assert first.fingerprint.weights != other.fingerprint.weights
