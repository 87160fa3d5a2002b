"""What a pipeline weighs and why a pair is refused, from configurations alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from handmade_maps import random_map
from random_models import available_architectures

from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.pair import Side, read_side, refusals, require_pair
from trtllm_kvmap.engine.parameters import count_parameters
from trtllm_kvmap.engine.plan import plan_pipeline
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.models import load_model
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.tiny import FAMILY, model_folder

ROOT = Path(__file__).resolve().parents[2]
CONFIG = PipelineConfig(max_tokens=1024, max_batch_size=3, relay_requests=2)


def tiny(name: str) -> Side:
    return read_side(model_folder(name))


def held(folder: Path) -> int:
    """Parameters of the model itself, tied ones once."""
    return sum(p.numel() for p in load_model(folder).model.parameters())


@pytest.mark.parametrize("architecture", available_architectures())
def test_parameters_are_counted_without_weights(
    model_folder: Callable[..., Path], architecture: str
) -> None:
    folder = model_folder(architecture, layers=3, kv_heads=2)
    assert read_side(folder).num_parameters == held(folder)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_bias_of_every_projection_is_counted(
    model_folder: Callable[..., Path], architecture: str
) -> None:
    folder = model_folder(architecture)
    config = json.loads((folder / "config.json").read_text())
    spec = read_side(folder).spec
    added = count_parameters({**config, "attention_bias": True}, spec) - held(folder)
    heads, head_dim = spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
    assert added == spec.num_layers * (heads * head_dim + config["hidden_size"])


def test_tied_embeddings_are_counted_once(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    config = json.loads((folder / "config.json").read_text())
    spec = read_side(folder).spec
    tied = [count_parameters({**config, "tie_word_embeddings": t}, spec) for t in (True, False)]
    assert tied[1] - tied[0] == spec.vocab_size * config["hidden_size"]


@pytest.mark.parametrize("name", FAMILY)
def test_a_config_alone_is_enough(tmp_path: Path, name: str) -> None:
    shutil.copy(model_folder(name) / "config.json", tmp_path / "config.json")
    whole, alone = tiny(name), read_side(tmp_path / "config.json")
    assert alone.num_parameters == whole.num_parameters == held(model_folder(name))
    assert alone.spec.kv_shape == whole.spec.kv_shape
    assert alone.tokenizer is None
    assert whole.tokenizer


def test_every_byte_of_a_pair() -> None:
    sizes = plan_pipeline(tiny("tiny-s"), tiny("tiny-x"), CONFIG, n=4).sizes
    # tiny-s 3 x 2 x 32, tiny-x 5 x 1 x 64: elements of keys and values for one token.
    source, target = 2 * 3 * 2 * 32, 2 * 5 * 1 * 64
    assert sizes.source_weights == 2 * held(model_folder("tiny-s"))
    assert sizes.target_weights == 2 * held(model_folder("tiny-x"))
    # 10 target heads of 64, each of 4 slices of 32 and a bias.
    assert sizes.map_weights == 2 * 10 * 64 * (4 * 32 + 1)
    # cos and sin, half of each head's channels, float32.
    assert sizes.map_rope_tables == 4 * 2 * 1024 * (32 // 2 + 64 // 2)
    assert sizes.source_pool == 3 * 1024 * source * 2
    assert sizes.target_pool == 3 * (1024 + 32) * target * 2  # 24 draft tokens, in whole blocks
    assert sizes.relay_source_pool == 2 * 1024 * source * 2
    assert sizes.relay_target_pool == 2 * 1024 * target * 2
    assert sizes.transfer_buffers == 2 * 1024 * 2 * (source + target)
    parts = {k: v for k, v in sizes.to_json().items() if k != "total"}
    assert sizes.total == sum(parts.values())


def test_a_map_that_is_there_is_weighed() -> None:
    source, target = (load_model(model_folder(name)) for name in ("tiny-s", "tiny-m"))
    kvmap = random_map(source, target, num_slices=2)
    sizes = plan_pipeline(tiny("tiny-s"), tiny("tiny-m"), CONFIG, kvmap).sizes
    # 20 target heads of 32, each of 2 slices of 32 and a bias.
    assert sizes.map_weights == 2 * 20 * 32 * (2 * 32 + 1)


def test_the_engines_are_what_a_handover_needs() -> None:
    plan = plan_pipeline(tiny("tiny-s"), tiny("tiny-m"), CONFIG)
    for engine in (plan.source, plan.target):
        assert engine.plugins["paged_kv_cache"] is True
        assert engine.plugins["use_paged_context_fmha"] is True
        assert engine.plugins["tokens_per_block"] == 32
        assert "--max_beam_width 1 " in engine.command
        assert "--use_paged_context_fmha enable" in engine.command
    assert plan.target.build["speculative_decoding_mode"] == "draft_tokens_external"
    assert plan.target.build["max_draft_len"] == 24
    assert "speculative_decoding_mode" not in plan.source.build


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_positions": 512}, "the source allows 512 tokens, fewer than max_tokens 1024"),
        (
            {"rope": RopeParams("dynamic", rotary_dim=32, factor=2.0, original_length=512)},
            "the source uses dynamic RoPE",
        ),
    ],
)
def test_a_source_that_does_not_fit(changed: dict[str, object], said: str) -> None:
    side = tiny("tiny-s")
    other = replace(side, spec=replace(side.spec, **changed))
    (sentence,) = refusals(other, tiny("tiny-m"), CONFIG, None)
    assert said in sentence
    with pytest.raises(MismatchError, match="No pipeline can be built"):
        require_pair(other, tiny("tiny-m"), CONFIG, None)


def test_other_tokenizers_are_refused() -> None:
    side = tiny("tiny-s")
    (sentence,) = refusals(replace(side, tokenizer="another"), tiny("tiny-m"), CONFIG, None)
    assert "different tokenizers" in sentence
    assert not list(refusals(replace(side, tokenizer=None), tiny("tiny-m"), CONFIG, None))


def test_a_map_of_another_pair_is_refused() -> None:
    source, target = (load_model(model_folder(name)) for name in ("tiny-s", "tiny-m"))
    kvmap = random_map(source, target)
    (sentence,) = refusals(tiny("tiny-s"), tiny("tiny-x"), CONFIG, kvmap)
    assert "(5, 2, 32)" in sentence
    assert "(5, 1, 64)" in sentence


def test_where_no_model_is() -> None:
    with pytest.raises(InputError, match=r"There is no .*config\.json"):
        read_side("no-such-folder")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "float32"}, "paged context FMHA needs one of bfloat16, float16"),
        ({"tokens_per_block": 24}, "a power of two"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"repair_window": -1}, "repair_window is -1"),
        ({"max_tokens": 63}, "no prompt has a whole block"),
        ({"beams": 2}, "no setting beams"),
    ],
)
def test_settings_no_engine_can_be_built_with(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PipelineConfig.of(settings)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "build_scripts" / "build_engines.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_dry_run_as_a_command(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    shutil.copy(model_folder("tiny-s") / "config.json", tmp_path / "a")
    shutil.copy(model_folder("tiny-m") / "config.json", tmp_path / "b")
    pair = ("--source", str(tmp_path / "a"), "--target", str(tmp_path / "b" / "config.json"))
    short = ("--max-tokens", "1024")
    result = run_script("--dry-run", "--json", *pair, *short)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["verified"] is False
    assert said["refusals"] == []
    expected = plan_pipeline(
        read_side(tmp_path / "a"), read_side(tmp_path / "b"), PipelineConfig(max_tokens=1024)
    )
    assert said == json.loads(json.dumps(expected.to_json()))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "config.json", "config.json"]
    refused = run_script("--dry-run", *pair)  # the tiny family allows 4,096 tokens, not 8,192
    assert refused.returncode == 1
    assert "Unverified" in refused.stdout
    assert "fewer than --max-tokens 8192: lower --max-tokens" in refused.stdout
