"""Tiny transformers models with random weights, written to disk the way real ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from trtllm_kvmap.tiny.documents import VOCABULARY

ROPE_IN_ONE_DICT = int(transformers.__version__.split(".")[0]) >= 5


def available_architectures() -> list[str]:
    """The architectures the tests run on, of those the installed transformers has."""
    wanted = ("qwen2", "qwen3", "llama", "mistral", "ministral", "ministral3")
    return [name for name in wanted if name in transformers.CONFIG_MAPPING]


def write_tokenizer(path: Path, words: list[str] | None = None) -> None:
    """A word-level tokenizer that splits at white space; ids are places in ``words`` (default: the
    tiny family's vocabulary).
    """
    words = VOCABULARY if words is None else words
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>", padding_side="left"
    ).save_pretrained(path)


def write_model(
    path: Path,
    architecture: str = "qwen3",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    max_positions: int = 512,
    rope: dict[str, Any] | None = None,
    seed: int = 0,
    words: list[str] | None = None,
) -> None:
    """Write a random ``architecture`` model and its tokenizer to the folder ``path``.

    ``rope`` holds the RoPE entries of a config (rope_type, rope_theta, factor, ...; also
    partial_rotary_factor). Weights are drawn wide enough that attention is far from uniform; norms
    and biases are random too, so that a test notices when one is left out.
    """
    config = make_config(
        architecture, layers, heads, kv_heads, head_dim, max_positions, dict(rope or {})
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.2 * noise + ("norm" in name))
    model.save_pretrained(path)
    write_tokenizer(path, words)


def make_config(
    architecture: str,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_positions: int,
    rope: dict[str, Any],
) -> Any:
    """The configuration in the installed transformers' own form (4.x and 5.x keep RoPE
    differently).
    """
    entries: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": heads * head_dim,
        "intermediate_size": 2 * heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "pad_token_id": VOCABULARY.index("<pad>"),
        "bos_token_id": VOCABULARY.index("<bos>"),
        "eos_token_id": None,
    }
    if architecture != "llama":
        entries["sliding_window"] = None
    if architecture == "ministral":  # it insists on a window, though no layer here uses one
        entries |= {"sliding_window": 16, "layer_types": ["full_attention"] * layers}
    if architecture == "ministral3":  # it also scales queries by position
        yarn = {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}
        rope = {**yarn, "original_max_position_embeddings": max_positions // 2, **rope}
    rope = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    if ROPE_IN_ONE_DICT:
        entries["rope_parameters"] = rope
    else:
        entries["rope_theta"] = rope.pop("rope_theta")
        for moved in ("partial_rotary_factor", "original_max_position_embeddings"):
            if moved in rope and rope["rope_type"] in ("default", "longrope"):
                entries[moved] = rope.pop(moved)
        entries["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        if architecture == "phi3":  # it knows the kind by its older name only
            rope["type"] = rope.pop("rope_type")
    return transformers.CONFIG_MAPPING[architecture](**entries)
