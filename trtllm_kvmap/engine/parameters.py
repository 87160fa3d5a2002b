"""How many parameters a model has, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_kvmap.spec.model import ModelSpec

# Norms of [hidden_size] in a layer, beside those of the heads.
LAYER_NORMS = {"glm4": 4}
# Architectures whose query, key and value projections have a bias whatever the configuration says.
BIASED = ("qwen2",)


def count_parameters(config: Mapping[str, Any], spec: ModelSpec) -> int:
    """Parameters of a decoder with a gated MLP (every architecture of models.ARCHITECTURES).

    ``config`` is the config.json that ``spec`` was read from. Raises KeyError when hidden_size or
    intermediate_size is missing.
    """
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = 2 * hidden * query + 2 * hidden * key_value  # q and o, k and v
    if spec.architecture in BIASED or config.get("attention_bias", False):
        layer += query + 2 * key_value
        if spec.architecture == "llama" or spec.architecture == "qwen3":
            layer += hidden  # their output projection takes a bias too
    if spec.architecture == "qwen3":
        layer += 2 * spec.head_dim  # norms of a head's query and key
    layer += 3 * hidden * inner
    if config.get("mlp_bias", False):
        layer += 2 * inner + hidden
    layer += LAYER_NORMS.get(spec.architecture, 2) * hidden
    embeddings = 1 if config.get("tie_word_embeddings", False) else 2
    return spec.num_layers * layer + embeddings * spec.vocab_size * hidden + hidden
