"""Our RoPE against transformers' own, for every kind, read off the same configuration."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from random_models import make_config

from trtllm_kvmap.models import rope_from_config
from trtllm_kvmap.rotary import apply_rope, remove_rope
from trtllm_kvmap.spec.rope import KINDS

HEADS, HEAD_DIM, MAX_POSITIONS = 2, 32, 64
ROTARY = {
    "llama": "LlamaRotaryEmbedding",
    "qwen3": "Qwen3RotaryEmbedding",
    "phi3": "Phi3RotaryEmbedding",
    "glm": "GlmRotaryEmbedding",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def longrope(rotary_dim: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.02 * i for i in range(rotary_dim // 2)],
        "long_factor": [1.0 + 0.5 * i for i in range(rotary_dim // 2)],
        "original_max_position_embeddings": 32,
    }


# architecture, entries of the configuration, length of the sequence
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "default": ("llama", {}, 60),
    "default-theta": ("qwen3", {"rope_theta": 1e6}, 60),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, 60),
    "dynamic-short": ("llama", {"rope_type": "dynamic", "factor": 2.0}, 60),
    "dynamic-long": ("llama", {"rope_type": "dynamic", "factor": 2.0}, 150),
    "yarn": ("llama", YARN, 60),
    "yarn-attention-factor": ("llama", {**YARN, "attention_factor": 0.8}, 60),
    "yarn-mscale": ("llama", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, 60),
    "yarn-betas": ("llama", {**YARN, "beta_fast": 8.0, "beta_slow": 0.5}, 60),
    "yarn-not-truncated": ("llama", {**YARN, "truncate": False}, 60),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        60,
    ),
    "longrope-short": ("llama", longrope(32), 32),
    "longrope-long": ("phi3", longrope(32), 33),
    "longrope-partial": ("phi3", {**longrope(16), "partial_rotary_factor": 0.5}, 60),
    "longrope-attention-factor": ("llama", {**longrope(32), "attention_factor": 1.5}, 60),
    "partial": ("phi3", {"partial_rotary_factor": 0.5}, 60),
    "partial-interleaved": ("glm", {"partial_rotary_factor": 0.5}, 60),
    "interleaved": ("glm", {"partial_rotary_factor": 1.0}, 60),
}


def theirs(architecture: str, config: Any) -> tuple[torch.nn.Module, Any]:
    """transformers' rotary embedding of ``config`` and its function that applies it."""
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    return getattr(module, ROTARY[architecture])(config=config), module.apply_rotary_pos_emb


@pytest.mark.parametrize("name", CASES)
def test_keys_and_frequencies_equal_transformers(name: str) -> None:
    architecture, entries, length = CASES[name]
    config = make_config(architecture, 1, 2 * HEADS, HEADS, HEAD_DIM, MAX_POSITIONS, dict(entries))
    rope = rope_from_config(config, HEAD_DIM)
    rotary, apply_rotary = theirs(architecture, config)
    x = torch.randn(1, HEADS, length, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length)
    cos, sin = rotary(x, positions[None])
    _, wanted = apply_rotary(x, x, cos, sin)

    frequencies = torch.from_numpy(rope.inverse_frequencies(length))
    torch.testing.assert_close(frequencies, rotary.inv_freq.double(), rtol=1e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
    # Their angles are float32: off by up to 150 * 2^-24, on keys of size up to 5.
    found = apply_rope(x.double(), positions, rope, length)
    torch.testing.assert_close(found, wanted.double(), rtol=0.0, atol=1e-4)
    back = remove_rope(wanted.double(), positions, rope, length)
    torch.testing.assert_close(back, x.double(), rtol=0.0, atol=1e-4)


def test_every_kind_is_compared() -> None:
    given = {entries.get("rope_type", "default") for _, entries, _ in CASES.values()}
    assert given == set(KINDS)
