"""What models/ reads off a configuration, and what tells two models apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_models import available_architectures, write_model

from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.models import load_model, require_same_tokens
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
