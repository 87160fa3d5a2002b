"""How long a head-local fit of Qwen3 14B -> 32B takes, from a measured sixteenth of it.

40 layers x 8 heads x 128 of the source, 64 x 8 x 128 of the target, the best 8 layers for every
head. With calibration scope head, each (head, keys or values) is a part of its own: 16 equal parts,
of which a band of one is fitted here from moments drawn at random.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from bench_fit import make_spec

from trtllm_kvmap.artifact.moments import MomentPart, Moments
from trtllm_kvmap.fit.centred import CentredPart
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.fit.head import fit_head
from trtllm_kvmap.machine import matmul_rate
from trtllm_kvmap.spec.slices import Slice

SOURCE, TARGET = make_spec("14b", 40, 8, 128), make_spec("32b", 64, 8, 128)
PARTS, LAYERS, FACTORS, TOKENS = 16, 4, 512, 200_000
CONFIG = FitConfig(scope="head", k=8)


def qwen3_fit_time() -> dict[str, Any]:
    """Seconds of one part (``LAYERS`` of its 64 target layers are solved; they cost alike), of all
    16, and the bytes one part needs. ``gpu_seconds_at`` is the same work at a float64 rate.
    """
    part = _part()
    started = time.perf_counter()
    groups = list(fit_head(CentredPart(part, SOURCE, TARGET), CONFIG))
    seconds = (time.perf_counter() - started) * TARGET.num_layers / LAYERS
    width = SOURCE.num_layers * SOURCE.head_dim
    chosen = CONFIG.k * SOURCE.head_dim
    memory = 8 * (2 * width * width + width * TARGET.num_layers * TARGET.head_dim)
    return {
        "measured_layers": len(groups),
        "seconds_a_part": seconds,
        "seconds_all_parts": PARTS * seconds,
        "bytes_of_moments_and_gram_a_part": memory,
        "map_parameters": 2 * TARGET.num_layers * TARGET.num_kv_heads * chosen * TARGET.head_dim,
        "float64_matmul_gflops_here": matmul_rate(torch.float64) / 1e9,
    }


def _part() -> MomentPart:
    """Head 0's keys in the first layers: moments of noisy views of ``FACTORS`` hidden numbers."""
    generator = torch.Generator().manual_seed(0)
    slices = tuple(Slice("source", "key", layer, 0) for layer in range(SOURCE.num_layers))
    targets = tuple(Slice("target", "key", layer, 0) for layer in range(LAYERS))
    widths = len(slices) * SOURCE.head_dim, len(targets) * TARGET.head_dim
    x, y = (
        torch.randn(w, FACTORS, generator=generator, dtype=torch.float64) / FACTORS**0.5
        for w in widths
    )
    gram = TOKENS * (x @ x.T)
    gram.diagonal().add_(0.1 * TOKENS)
    square = TOKENS * (y.square().sum(1) + 0.1)
    sums = torch.zeros(widths[0], dtype=torch.float64), torch.zeros(widths[1], dtype=torch.float64)
    return MomentPart(slices, targets, Moments(gram, TOKENS * (x @ y.T), *sums, square, TOKENS))
