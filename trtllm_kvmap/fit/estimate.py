"""What a fit will cost, from two specs and a configuration, before the moments are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.machine import say_bytes, say_seconds
from trtllm_kvmap.spec.model import ModelSpec

# Operations of a matmul, over n^3, in the time that an n x n eigen-decomposition takes: measured
# from 9 (n = 1,024) to 44 (256) on a CPU.
EIGEN = 20
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class FitEstimate:
    """``memory_bytes`` holds the moments, the working set and the map; ``map_bytes`` is the file
    without its token table.
    """

    memory_bytes: int
    map_bytes: int
    seconds: float
    available: int

    def sentences(self) -> list[str]:
        said = [
            f"The fit needs {say_bytes(self.memory_bytes)} of memory and takes about "
            f"{say_seconds(self.seconds)}; the map takes {say_bytes(self.map_bytes)} of disk."
        ]
        if self.memory_bytes > self.available:
            said.append(
                f"That is more memory than the {say_bytes(self.available)} at hand: calibrate in "
                f"layer bands, or with scope head, and fit from the shards."
            )
        return said


def estimate_fit(
    source: ModelSpec,
    target: ModelSpec,
    config: FitConfig,
    *,
    flops_per_second: float,
    available: int,
) -> FitEstimate:
    """For moments of all slices (joint when both fields are read), a float64 matmul rate
    (machine.matmul_rate) and bytes of memory at hand.
    """
    joint = config.fields == "both"
    own = target.num_kv_heads * target.head_dim
    width = (source.num_layers * source.num_kv_heads * source.head_dim + own) * (1 + joint)
    targets = target.num_layers * target.num_kv_heads * target.head_dim * (1 + joint)
    moments = 8 * width * (width + targets) * (1 if joint else 2)
    if config.scope == "copy":
        return FitEstimate(moments, 0, 0.0, available)
    block, count, out, groups = _shape(source, target, config)
    readable = width if config.scope == "slice" else block * source.num_layers
    chosen = block * count
    cut = 0 < config.rank < min(chosen, out)
    stored = config.rank * (chosen + 1 + out) if cut else chosen * out
    map_bytes = BYTES[config.dtype] * groups * stored
    # A cut-out gram, its factor or its residual rows, the cross and its residual.
    working = 8 * readable * (readable + chosen + 2 * out)
    if cut:  # the matrix that is decomposed, the cost of errors, their roots, vectors and scratch
        working += 8 * 12 * out**2
    whole = config.scope != "slice" and count >= source.num_layers
    factor, solve = chosen**3 / 3, 2 * chosen**2 * out
    if whole:  # one factor for all groups that read the same slices
        factors = 2 * (source.num_kv_heads if config.scope == "head" else 1)
        flops = factors * factor + groups * solve
    else:
        # Each step: the new block's residual rows, then every candidate's gram, cross and gain.
        rows = readable * chosen**2
        updates = 3 * readable * chosen * (block + out)
        flops = groups * (rows + updates + factor + solve)
    if cut:
        flops += groups * _cut_flops(chosen, out, config)
    return FitEstimate(
        memory_bytes=moments + working + map_bytes,
        map_bytes=map_bytes,
        seconds=flops / flops_per_second,
        available=available,
    )


def _cut_flops(columns: int, out: int, config: FitConfig) -> int:
    """Of lowrank.truncate for a matrix [columns, out], and of judging what it leaves."""
    decomposed, squares = (6, 11) if config.cut == "output" else (1, 2)  # matrices [out, out]
    inputs = 1 if config.cut == "plain" else 2  # W^T W, W^T G W
    flops = (EIGEN * decomposed + 2 * squares) * out**3 + 2 * inputs * columns * out**2
    return flops + 2 * columns**2 * out + 4 * columns * out * config.rank


def _shape(source: ModelSpec, target: ModelSpec, config: FitConfig) -> tuple[int, int, int, int]:
    """(columns of a candidate block, blocks chosen, columns of a group of heads, groups)."""
    heads, layers = target.num_kv_heads, target.num_layers
    if config.scope == "slice":
        return source.head_dim, config.n, target.head_dim, 2 * layers * heads
    fields = 2 if config.fields == "both" else 1
    block, count = fields * source.head_dim, min(config.k, source.num_layers)
    if config.scope == "head":
        return block, count, target.head_dim, 2 * layers * heads
    return block * source.num_kv_heads, count, heads * target.head_dim, 2 * layers
