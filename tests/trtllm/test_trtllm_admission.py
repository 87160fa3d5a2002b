"""What forbids to map into an engine, and what a map's process needs to know."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_blocks
import fake_tensorrt_llm as fake
import pytest
import torch
import transformers
from connector_world import World
from fake_host import Shell, llm_args, start_target, write_settings

from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.inject.trtllm.pool import view_pool
from trtllm_kvmap.tiny import model_folder

TARGET, SOURCE = model_folder("tiny-m"), model_folder("tiny-s")


def _cache(**changes: Any) -> dict[str, Any]:
    return {"kv_cache_config": replace(fake.KvCacheConfig(), **changes)}


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "tensor parallel": ({"tensor_parallel_size": 2}, "tensor parallelism is 2 here"),
    "pipeline parallel": ({"pipeline_parallel_size": 2}, "pipeline parallelism is 2"),
    "context parallel": ({"context_parallel_size": 2}, "context parallelism is 2"),
    "attention dp": ({"enable_attention_dp": True}, "attention data parallelism is on"),
    "beams": ({"max_beam_width": 4}, "the beam width is 4"),
    "no reuse": (_cache(enable_block_reuse=False), "block reuse .* is off"),
    "host offload": (_cache(host_cache_size=1 << 30), "host offload of blocks is on"),
    "windows": (_cache(max_attention_window=[512, 4096]), "attention windows are"),
    "block size": (_cache(tokens_per_block=48), "tokens_per_block is 48: it needs a power of two"),
    "fp8": (_cache(dtype="fp8"), "the cache is fp8"),
    "int8": (_cache(dtype="int8"), "its cache is int8"),
    "manager of version 2": (
        _cache(use_kv_cache_manager_v2=True),
        "the KV cache manager is version 2",
    ),
    "eviction": (
        {"scheduler_config": fake.SchedulerConfig(fake.CapacitySchedulerPolicy.MAX_UTILIZATION)},
        "the capacity scheduler policy is MAX_UTILIZATION",
    ),
    "another layout": ({"attn_backend": "FLASHINFER"}, "this pool layout is not known"),
    "compiled": ({"torch_compile_config": object()}, "torch.compile is on"),
    "speculation": ({"speculative_config": object()}, "speculation is on"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_engine_that_cannot_take_mapped_kv(
    imported: Shell, settings: Path, world: World, option: str
) -> None:
    changes, sentence = OPTIONS[option]
    args = replace(llm_args(TARGET), **changes)
    with pytest.raises(MismatchError, match=f"TensorRT-LLM cannot take mapped KV: .*{sentence}"):
        imported.connector.KvMapWorker(args)


def test_every_refusal_is_told_at_once(imported: Shell, settings: Path, world: World) -> None:
    args = llm_args(TARGET, tensor_parallel_size=2, pipeline_parallel_size=2, max_beam_width=2)
    with pytest.raises(MismatchError) as refused:
        imported.connector.KvMapWorker(args)
    for sentence in ("tensor parallelism", "pipeline parallelism", "beam width"):
        assert sentence in str(refused.value)


def test_the_engine_must_run_the_model_the_map_was_fitted_for(
    imported: Shell, settings: Path, world: World
) -> None:
    with pytest.raises(MismatchError, match="fitted for another target model"):
        imported.connector.KvMapWorker(llm_args(SOURCE))


def test_the_check_of_the_weights_does_not_load_the_model(
    imported: Shell, settings: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large target in float32 may not even fit beside the engine's own."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    imported.connector.KvMapWorker(llm_args(TARGET))


@pytest.mark.parametrize(
    "shape",
    [(8, 5, 2, 2 * 32 * 32, 1), (8, 4, 2, 2 * 32 * 32), (8, 5, 1, 2 * 32 * 32), (8, 5, 2, 999)],
)
def test_a_pool_of_another_shape(world: World, shape: tuple[int, ...]) -> None:
    with pytest.raises(MismatchError, match="needs one contiguous pool of"):
        view_pool(torch.zeros(shape), world.target.spec, 32)


def test_a_pool_whose_layout_is_regions_is_refused(
    imported: Shell, settings: Path, world: World
) -> None:
    host = start_target(imported, world.target, fake_blocks.BLOCKS.awaited)
    with pytest.raises(MismatchError, match="use_kv_cache_manager_v2 to False"):
        host.executor.worker.register_kv_cache_layout(object())


def test_the_pool_is_seen_as_blocks_of_heads_tokens_channels(world: World) -> None:
    """The address formula of the engine: element = head * T * D + token * D + channel."""
    spec, size = world.target.spec, 16
    layers, heads, head_dim = spec.kv_shape
    pool = torch.arange(3 * layers * 2 * heads * size * head_dim, dtype=torch.float32)
    block, layer, head, token, channel = 2, 3, 1, 7, 5
    view = view_pool(pool.view(3, layers, 2, heads * size * head_dim), spec, size)
    for field, views in enumerate((view.keys, view.values)):
        at = ((block * layers + layer) * 2 + field) * heads * size * head_dim
        at += head * size * head_dim + token * head_dim + channel
        assert int(views[layer][block, head, token, channel]) == at


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (None, "TRTLLM_KVMAP_CONNECTOR is not set"),
        ("{", "cannot be read as JSON"),
        ("[]", "needs one JSON object"),
        (json.dumps({"exports": "fake_blocks:BLOCKS"}), "this engine is no target"),
        (json.dumps({"kvmap": "a", "blocks": "b", "repair": 3}), "no setting repair"),
    ],
)
def test_settings_that_say_nothing_of_use(
    imported: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: str | None,
    sentence: str,
) -> None:
    monkeypatch.delenv("TRTLLM_KVMAP_CONNECTOR", raising=False)
    if written is not None:
        (tmp_path / "settings.json").write_text(written)
        monkeypatch.setenv("TRTLLM_KVMAP_CONNECTOR", str(tmp_path / "settings.json"))
    with pytest.raises(InputError, match=sentence):
        imported.connector.KvMapScheduler(llm_args(TARGET))


def test_a_source_needs_exports_that_are_told_what_to_keep(
    imported: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_settings(tmp_path / "settings.json", exports="fake_blocks:BLOCKS")
    monkeypatch.setenv("TRTLLM_KVMAP_CONNECTOR", path)
    with pytest.raises(InputError, match="names no WantedExports"):
        imported.connector.KvExportScheduler(llm_args(SOURCE))
