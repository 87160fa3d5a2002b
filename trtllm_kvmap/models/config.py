"""What is read off a transformers configuration: the KV geometry and RoPE of a model."""

from __future__ import annotations

import math
from typing import Any

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import KINDS, RopeParams

# Architectures whose cache is known to hold k-normed, rotated keys; the value says whether RoPE
# pairs are interleaved.
ARCHITECTURES = {
    "qwen2": False,
    "qwen3": False,
    "llama": False,
    "mistral": False,
    "ministral": False,
    "ministral3": False,
    "phi3": False,
    "glm": True,
    "glm4": True,
}


def spec_from_config(config: Any, name: str) -> ModelSpec:
    """The KV geometry that ``config`` (a transformers configuration) describes. Raises
    MismatchError, see load_model.
    """
    config = getattr(config, "text_config", None) or config
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise MismatchError(
            f"The architecture {kind!r} of {name} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    _refuse_windows(config, name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = rope_from_config(config, head_dim)
    # dynamic RoPE stretches the declared length; every other kind declares the stretched one.
    stretch = rope.factor if rope.kind == "dynamic" else 1.0
    return ModelSpec(
        name=name,
        architecture=kind,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_positions=int(config.max_position_embeddings * stretch),
        rope=rope,
        dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
    )


def _refuse_windows(config: Any, name: str) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    if kinds != {"full_attention"} or (windowed and not getattr(config, "layer_types", None)):
        raise MismatchError(
            f"{name} uses sliding-window attention in some layers; a map needs full attention in "
            f"every layer, because "
            f"a window has dropped the keys it would write."
        )


def rope_from_config(config: Any, head_dim: int) -> RopeParams:
    """RoPE as ``config`` declares it, in both the 4.x (rope_theta, rope_scaling) and 5.x
    (rope_parameters) form.
    """
    declared = {
        **(getattr(config, "rope_scaling", None) or {}),
        **(getattr(config, "rope_parameters", None) or {}),
    }
    kind = declared.get("rope_type", declared.get("type", "default")) or "default"
    if kind not in KINDS:
        raise MismatchError(
            f"RoPE kind {kind!r} is not supported; supported are {', '.join(KINDS)}."
        )
    partial = (
        declared.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
    )
    length = config.max_position_embeddings
    trained = declared.get(
        "original_max_position_embeddings",
        getattr(config, "original_max_position_embeddings", None),
    )
    original = length if kind == "dynamic" else (trained or length)
    factor = float(declared.get("factor") or length / original)
    return RopeParams(
        kind=kind,
        theta=float(declared.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        rotary_dim=int(head_dim * partial),
        interleaved=ARCHITECTURES[config.model_type],
        factor=factor,
        original_length=int(original),
        attention_factor=_attention_factor(kind, declared, factor, int(original)),
        beta_fast=float(declared.get("beta_fast") or 32.0),
        beta_slow=float(declared.get("beta_slow") or 1.0),
        truncate=bool(declared.get("truncate", True)),
        low_freq_factor=float(declared.get("low_freq_factor") or 1.0),
        high_freq_factor=float(declared.get("high_freq_factor") or 4.0),
        short_factor=tuple(declared.get("short_factor") or ()) if kind == "longrope" else (),
        long_factor=tuple(declared.get("long_factor") or ()) if kind == "longrope" else (),
    )


def _attention_factor(kind: str, declared: dict[str, Any], factor: float, original: int) -> float:
    given = declared.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return float(given)
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, mscale_all = declared.get("mscale"), declared.get("mscale_all_dim")
    if mscale and mscale_all:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
