"""What a warm hand-over costs beside the prefill it replaces (run it through bench.py).

Warm: the source has read the prompt and both models are loaded. A hand-over is map, inject, repair
of 32 tokens and the first token's logits; a prefill is the target reading the same prompt. The two
take turns in one run; figures are medians of the ratios of turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bench_map import dense_pool, map_fraction_of_matmul, pooled_map, ratio, ratio_to_aither
from transformers import Qwen2Config, Qwen2ForCausalLM

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.inject.hf_cache import HfCache, make_cache, view_pool
from trtllm_kvmap.models import LoadedModel, load_model, spec_from_config
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder

LENGTHS = (1024, 4096)
REPAIR_WINDOW, FIRST_TOKENS = 32, 1
TINY_ROUNDS, LARGE_ROUNDS = 9, 1


@dataclass(frozen=True)
class Shape:
    """A randomly initialised Qwen2 model: only its size matters for time."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int


SMALL = Shape("random-0.5b", 24, 896, 14, 2, 4864)
LARGE = Shape("random-1.5b", 28, 1536, 12, 2, 8960)


def bench_handoff() -> dict[str, object]:
    """The figures of `bench.py handoff`, see the module."""
    tiny = load_model(model_folder("tiny-s")), load_model(model_folder("tiny-m"))
    large = random_model(SMALL), random_model(LARGE)
    return {
        "handoff_to_prefill": ratios(*tiny, TINY_ROUNDS),
        "handoff_to_prefill_random_0.5b_to_1.5b": ratios(*large, LARGE_ROUNDS),
        "map_fraction_of_matmul": map_fraction_of_matmul(),
        "ratio_to_aither": ratio_to_aither(),
        "rounds": {"tiny": TINY_ROUNDS, "random": LARGE_ROUNDS},
        "threads": torch.get_num_threads(),
    }


def ratios(
    source: LoadedModel, target: LoadedModel, rounds: int, lengths: Sequence[int] = LENGTHS
) -> dict[str, float]:
    """Hand-over time over prefill time by prompt length, with a map that pools every layer."""
    bridge = KvBridge(map_between(source, target), source=source, target=target)
    found = {}
    for length in lengths:
        ids = torch.arange(length) % source.spec.vocab_size
        plan = plan_handoff(length, first_tokens=FIRST_TOKENS, repair_window=REPAIR_WINDOW)
        cache = random_cache(source, length)
        found[str(length)] = ratio(
            lambda cache=cache, ids=ids, plan=plan: bridge.hand_over(cache, ids, plan),
            lambda ids=ids: prefill(target, ids, logits_to_keep=1),
            rounds,
        )
    return found


def map_between(source: LoadedModel, target: LoadedModel) -> KvMap:
    """Random weights: a map's time does not depend on what it learned."""
    blank = pooled_map(source.spec, target.spec)
    return KvMap(
        source=source.spec,
        target=target.spec,
        source_fingerprint=source.fingerprint,
        target_fingerprint=target.fingerprint,
        scope=blank.scope,
        groups=blank.groups,
        fitted={},
    )


def random_cache(loaded: LoadedModel, length: int) -> HfCache:
    """As if ``loaded`` had read ``length`` tokens; reading them for real changes no time here."""
    cache = make_cache(loaded.spec, length, batch=1, dtype=torch.float32, device=loaded.device)
    pool, numbers = view_pool(cache), dense_pool(loaded.spec, length)
    for view, random in zip((*pool.keys, *pool.values), (*numbers.keys, *numbers.values)):  # noqa: B905
        view.copy_(random)
    return cache


def random_model(shape: Shape) -> LoadedModel:
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        max_position_embeddings=8192,
    )
    model = Qwen2ForCausalLM(config).eval()
    return LoadedModel(shape.name, model, None, spec_from_config(config, shape.name))
