"""Gradients of what the target says next, against finite differences."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trtllm_kvmap.calibrate.capture import capture_kv, read
from trtllm_kvmap.calibrate.sensitivity import gradients
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.inject.hf_cache import make_cache, view_pool
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.rotary import apply_rope

DOCUMENT = [3, 17, 4, 44, 21, 9, 58, 30, 12, 51, 6, 27, 35, 40]


@pytest.mark.parametrize("trainable", [False, True])
def test_no_gradient_of_the_weights_is_kept(
    model_folder: Callable[..., Path], trainable: bool
) -> None:
    """A loaded model asks for none; one that is being trained keeps what it asked for."""
    loaded = load_model(model_folder("qwen3", layers=2, seed=3))
    weights = list(loaded.model.parameters())
    assert not any(weight.requires_grad for weight in weights)
    loaded.model.requires_grad_(trainable)
    cache = read(loaded, torch.tensor(DOCUMENT))
    gradients(loaded, cache, [[5, 9, 2]])
    assert all(weight.requires_grad == trainable and weight.grad is None for weight in weights)
    held = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    assert not any(x.requires_grad or x.grad is not None for x in held)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_gradients_are_those_of_finite_differences(
    random_model: Callable[..., LoadedModel], architecture: str
) -> None:
    loaded = random_model(architecture, layers=2, seed=3)
    ids, after = torch.tensor(DOCUMENT), [5, 9, 2]
    (found,) = gradients(loaded, read(loaded, ids), [after])
    kv, positions = capture_kv(loaded, ids), torch.arange(len(ids))
    rope, length = loaded.spec.rope, loaded.rope_length(len(ids))

    def read_after(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cache = make_cache(loaded.spec, len(ids))
        pool = view_pool(cache)
        for layer in range(loaded.spec.num_layers):
            pool.keys[layer][0] = apply_rope(keys[layer], positions, rope, length)
            pool.values[layer][0] = values[layer]
        return prefill(loaded, after, cache).logits.double().log_softmax(-1)

    native = read_after(kv.keys, kv.values)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((len(ids), after)).encode()))
    drawn = torch.multinomial(native.float().exp(), 1, generator=generator)
    step = 1e-2
    for field in ("keys", "values"):
        gradient = getattr(found, field)
        direction = gradient / gradient.norm()
        losses = []
        for sign in (1, -1):
            moved = {"keys": kv.keys, "values": kv.values}
            moved[field] = moved[field] + sign * step * direction
            losses.append(float(-read_after(**moved).gather(1, drawn).sum()))
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx(float(gradient.norm()), rel=0.02)
