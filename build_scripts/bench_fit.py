"""How long a fit takes once moments exist, for every scope, at the geometry of a 0.5B -> 1.5B pair
(run it through bench.py fit).

The moments are those of factor-structured activations: every slice of both models is a noisy linear
view of one hidden state, so that selection has something to find. They are written down from the
factors; no activation is ever drawn.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.moments import MomentPart, Moments, MomentSet
from trtllm_kvmap.artifact.native import TokenTable
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.spec.slices import FIELDS, Field, own_slices, source_slices

SOURCE = ("0.5b", 24, 2, 64)
TARGET = ("1.5b", 28, 2, 128)
TOKENS = 20_000
FACTORS = 512
NOISE = 0.3
CONFIGS = (
    FitConfig(scope="copy"),
    FitConfig(scope="head", k=4),
    FitConfig(scope="pooled", k=24),
    FitConfig(scope="slice", n=12),
)


def bench_fit() -> dict[str, float | str]:
    """Seconds per scope and in all; a scope that the geometry forbids gives its reason."""
    moments = synthetic_moments(make_spec(*SOURCE), make_spec(*TARGET))
    seconds: dict[str, float | str] = {}
    for config in CONFIGS:
        start = time.perf_counter()
        try:
            fit(moments, config)
        except MismatchError as reason:
            seconds[config.scope] = str(reason)
        else:
            seconds[config.scope] = time.perf_counter() - start
    return {**seconds, "total": sum(s for s in seconds.values() if not isinstance(s, str))}


def make_spec(name: str, num_layers: int, num_kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture="qwen2",
        num_layers=num_layers,
        num_heads=6 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=64,
        max_positions=32768,
        rope=RopeParams(rotary_dim=head_dim),
    )


def synthetic_moments(source: ModelSpec, target: ModelSpec, seed: int = 0) -> MomentSet:
    """Moments of x = A z + noise and y = B z + noise for ``TOKENS`` tokens with unit z. A layer
    sees the factors near its own depth; the target's own layer 0 among the sources is its layer 0.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = tuple(_part(field, source, target, generator) for field in FIELDS)
    shape = (target.vocab_size, target.num_kv_heads, target.head_dim)
    return MomentSet(
        source=source,
        target=target,
        source_fingerprint=Fingerprint("source", "", ""),
        target_fingerprint=Fingerprint("target", "", ""),
        parts=parts,
        record={"documents": 1, "tokens": TOKENS, "text": "synthetic"},
        token_table=TokenTable(torch.zeros(shape), torch.zeros(shape)),
    )


def _part(
    field: Field, source: ModelSpec, target: ModelSpec, generator: torch.Generator
) -> MomentPart:
    x, y = _loadings(source, generator), _loadings(target, generator)
    own_width = target.num_kv_heads * target.head_dim
    x = torch.cat([x, y[:own_width]])
    gram = TOKENS * (x @ x.T)
    gram.diagonal().add_(TOKENS * NOISE**2)
    cross = TOKENS * (x @ y.T)
    cross[-own_width:, :own_width].diagonal().add_(TOKENS * NOISE**2)
    moments = Moments(
        gram=gram,
        cross=cross,
        source_sum=torch.zeros(x.shape[0], dtype=torch.float64),
        target_sum=torch.zeros(y.shape[0], dtype=torch.float64),
        target_square=TOKENS * (y.square().sum(1) + NOISE**2),
        count=TOKENS,
    )
    slices = source_slices(field, source.num_layers, source.num_kv_heads)
    targets = source_slices(field, target.num_layers, target.num_kv_heads)
    return MomentPart(
        slices=slices + own_slices(field, target.num_kv_heads),
        targets=tuple(replace(t, origin="target") for t in targets),
        moments=moments,
    )


def _loadings(spec: ModelSpec, generator: torch.Generator) -> torch.Tensor:
    """float64 [columns, FACTORS]: a column weighs the factors by their distance to its depth."""
    width = spec.num_kv_heads * spec.head_dim
    depth = (torch.arange(spec.num_layers, dtype=torch.float64) + 0.5) / spec.num_layers
    place = torch.linspace(0, 1, FACTORS, dtype=torch.float64)
    weight = torch.exp(-((depth[:, None] - place).square()) / 0.02).repeat_interleave(width, 0)
    noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    loadings = noise * weight
    return loadings / loadings.norm(dim=1, keepdim=True)
