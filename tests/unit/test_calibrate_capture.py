"""Captured keys and values against what the projections of each layer really put out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trtllm_kvmap.calibrate.capture import CapturedKv, capture_kv, sink_entry, token_table
from trtllm_kvmap.errors import NumericsError
from trtllm_kvmap.models import LoadedModel, load_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("qwen2", {}, id="qwen2"),  # biases
    pytest.param("qwen3", {}, id="qwen3"),  # k-norm
    pytest.param("llama", {"rope": YARN}, id="yarn"),  # an attention factor
]


def projected(loaded: LoadedModel, token_ids: torch.Tensor) -> CapturedKv:
    """The outputs of k_norm (k_proj where there is none) and v_proj, by forward hooks."""
    spec, found = loaded.spec, {"k_proj": [], "v_proj": []}
    handles = []
    for layer in loaded.model.base_model.layers:
        attention: Any = layer.self_attn
        for name, module in (
            ("k_proj", getattr(attention, "k_norm", attention.k_proj)),
            ("v_proj", attention.v_proj),
        ):
            handles.append(
                module.register_forward_hook(lambda _, __, out, name=name: found[name].append(out))
            )
    with torch.no_grad():
        loaded.model(input_ids=token_ids[None])
    for handle in handles:
        handle.remove()
    shape = (len(token_ids), spec.num_kv_heads, spec.head_dim)
    keys, values = (torch.stack([x.view(shape) for x in xs]) for xs in found.values())
    return CapturedKv(keys.transpose(1, 2), values.transpose(1, 2))


def some_ids(loaded: LoadedModel, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(loaded.spec.vocab_size, (count,), generator=generator)


@pytest.mark.parametrize(("architecture", "options"), MODELS)
def test_captured_kv_is_what_the_projections_put_out(
    random_model: Callable[..., LoadedModel], architecture: str, options: dict[str, Any]
) -> None:
    loaded = random_model(architecture, layers=3, **options)
    ids = some_ids(loaded, 90)
    kv, expected = capture_kv(loaded, ids), projected(loaded, ids)
    assert kv.keys.shape == kv.values.shape == (3, 2, 90, 16)
    torch.testing.assert_close(kv.keys, expected.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv.values, expected.values, rtol=0, atol=0)


@pytest.mark.parametrize(("architecture", "options"), MODELS)
def test_the_token_table_is_layer_0_at_any_position(
    random_model: Callable[..., LoadedModel], architecture: str, options: dict[str, Any]
) -> None:
    loaded = random_model(architecture, layers=3, **options)
    table, ids = token_table(loaded), some_ids(loaded, 90)
    assert table.keys.shape == table.values.shape == (loaded.spec.vocab_size, 2, 16)
    kv = capture_kv(loaded, ids)
    torch.testing.assert_close(table.keys[ids], kv.keys[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        table.values[ids], kv.values[0].transpose(0, 1), rtol=1e-5, atol=1e-6
    )


def test_the_token_table_is_made_in_batches(
    random_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = random_model()
    whole = token_table(loaded)
    monkeypatch.setattr("trtllm_kvmap.calibrate.capture.TABLE_BATCH", 16)
    pieces = token_table(loaded)
    torch.testing.assert_close(pieces.keys, whole.keys, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pieces.values, whole.values, rtol=1e-5, atol=1e-6)


def test_only_layer_0_runs_for_the_token_table(random_model: Callable[..., LoadedModel]) -> None:
    loaded = random_model(layers=3)
    ran: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(loaded.model.base_model.layers)
    ]
    token_table(loaded)
    assert ran == []  # layer 0 is entered, no layer ends
    capture_kv(loaded, some_ids(loaded, 5))
    assert ran == [0, 1, 2]  # and the model is as it was
    for handle in handles:
        handle.remove()


def test_a_sink_is_what_the_cache_of_a_longer_prompt_begins_with(
    random_model: Callable[..., LoadedModel],
) -> None:
    loaded = random_model()
    ids = some_ids(loaded, 40)
    entry = sink_entry(loaded, ids[:6].tolist())
    with torch.no_grad():
        out = loaded.model(input_ids=ids[None], use_cache=True)
    layers: Any = out[loaded.cache_argument].layers
    assert entry.token_ids == tuple(ids[:6].tolist())
    for index, layer in enumerate(layers):
        torch.testing.assert_close(entry.keys[index], layer.keys[0, :, :6], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            entry.values[index], layer.values[0, :, :6], rtol=1e-5, atol=1e-5
        )


def test_a_damaged_model_is_refused(model_folder: Callable[..., Path]) -> None:
    loaded = load_model(model_folder(layers=3))
    with torch.no_grad():
        loaded.model.base_model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="NaN or infinite; its weights are damaged"):
        capture_kv(loaded, some_ids(loaded, 9))
    with torch.no_grad():
        loaded.model.base_model.embed_tokens.weight[7, 0] = float("inf")
    with pytest.raises(NumericsError, match="NaN or infinite"):
        token_table(loaded)
