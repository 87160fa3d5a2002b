"""What a calibration will cost, from two specs and a configuration, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_kvmap.calibrate.accumulate import ROWS
from trtllm_kvmap.calibrate.config import CalibrationConfig, Weighting
from trtllm_kvmap.calibrate.parts import PartPlan, plan_parts
from trtllm_kvmap.calibrate.regard import QUERIES
from trtllm_kvmap.machine import say_bytes, say_seconds
from trtllm_kvmap.spec.model import ModelSpec

# Into how many runs, one layer band each, a calibration is cut at most: every run reads all text.
MOST_RUNS = 16
# What a share of attention costs beside its products, in operations of a matmul: a dozen passes
# over memory, each as long as some 80 of them on a CPU.
SHARE = 1000


@dataclass(frozen=True, slots=True)
class Shard:
    """``runs`` calibrations, one after another, each like ``config`` with a layer band of its own;
    ``memory_bytes`` is what one of them needs.
    """

    config: CalibrationConfig
    runs: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class CalibrationEstimate:
    """``moments_bytes`` is the file; ``memory_bytes`` comes on top of the two loaded models;
    ``disk_bytes`` counts a checkpoint beside the file. ``shard`` is a way that fits ``available``
    bytes when the configuration does not (None: it fits, or nothing does). ``seconds`` are the
    operations of _operations, all at the rate of a large matmul.
    """

    moments_bytes: int
    memory_bytes: int
    disk_bytes: int
    seconds: float
    tokens: int
    weighting: Weighting
    available: int
    shard: Shard | None

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.available

    def sentences(self) -> list[str]:
        weighed = self.weighting != "uniform"
        ends = ", the last quarter of each document for the weights of the rest," if weighed else ""
        said = [
            f"The moments take {say_bytes(self.moments_bytes)}.",
            f"Calibration needs {say_bytes(self.memory_bytes)} of memory beside the two models, "
            f"and {say_bytes(self.disk_bytes)} of disk.",
            f"Reading {self.tokens:,} tokens{ends} takes about {say_seconds(self.seconds)}; "
            f"roughly, because a spec does not say how wide a model is.",
        ]
        if not self.fits:
            said.append(f"That is more memory than the {say_bytes(self.available)} at hand.")
        if self.shard is not None:
            flags = " ".join(_flags(self.shard.config)) or "no shard option"
            times = f"{self.shard.runs} runs, a layer band each" if self.shard.runs > 1 else "1 run"
            said.append(
                f"What fits: {flags}; {times}, {say_bytes(self.shard.memory_bytes)} of memory."
            )
        elif not self.fits:
            said.append("No shard of this pair fits; a machine with more memory is needed.")
        return said


def estimate_calibration(
    source: ModelSpec,
    target: ModelSpec,
    config: CalibrationConfig,
    *,
    tokens: int,
    flops_per_second: float,
    available: int,
) -> CalibrationEstimate:
    """``tokens`` of text, a float32 matmul rate (machine.matmul_rate) and bytes of memory at hand.
    Raises what plan_parts raises.
    """
    plans = plan_parts(source, target, config)
    moments = sum(_part_bytes(plan, config) for plan in plans)
    memory = _memory(source, target, config)
    return CalibrationEstimate(
        moments_bytes=moments,
        memory_bytes=memory,
        disk_bytes=2 * moments + _table_bytes(target),
        seconds=tokens * _operations(source, target, config) / flops_per_second,
        tokens=tokens,
        weighting=config.weighting,
        available=available,
        shard=None if memory <= available else _fitting_shard(source, target, config, available),
    )


def _operations(source: ModelSpec, target: ModelSpec, config: CalibrationConfig) -> float:
    """Of a token of text: both models read it, and every part adds it up. Where rows are weighed,
    the target alone reads the last quarter, and looks at it.
    """
    # Only the gram's upper triangle is computed: width^2 instead of 2 width^2.
    plans = plan_parts(source, target, config)
    sums = sum(p.width**2 + 2 * p.width * p.target_width for p in plans)
    added = sums + 2 * _parameters(source) + 2 * _parameters(target)
    if config.weighting == "uniform":
        return added
    regarded = _regard_operations(target, config.window(source, target), config.weighting)
    return 3 / 4 * added + 1 / 4 * regarded


def _regard_operations(target: ModelSpec, window: int, weighting: Weighting) -> int:
    """Of a token that is read on top of a window: the pass with its attention, its queries'
    products (float64, half as fast), and the gradient through all of it and the next words' scores
    (as much again, twice in attention), or all shares of attention, times three.
    """
    width = target.num_heads * target.head_dim
    attention = 4 * target.num_layers * width * window
    products = 4 * target.num_layers * width * target.head_dim
    read = 2 * _parameters(target) + attention + products
    if weighting == "sensitivity":
        scores = 4 * target.vocab_size * width
        return read + 2 * _parameters(target) + 2 * attention + scores
    return read + 3 * attention // 2 + SHARE * target.num_layers * target.num_heads * window


def _fitting_shard(
    source: ModelSpec, target: ModelSpec, config: CalibrationConfig, available: int
) -> Shard | None:
    """The shard that gives up least: layer bands first, which lose nothing, then crossing keys with
    values, then crossing heads.
    """
    ways = [config, replace(config, joint=False)]
    if source.num_kv_heads == target.num_kv_heads:
        ways.append(replace(config, joint=False, scope="head"))
    first, last = config.layers or (0, target.num_layers)
    for way in ways:
        runs = 1
        while runs <= min(MOST_RUNS, last - first):
            band = (first, first + -(-(last - first) // runs))
            shard = way if runs == 1 else replace(way, layers=band)
            memory = _memory(source, target, shard)
            if memory <= available:
                return Shard(shard, runs, memory)
            runs *= 2
    return None


def _memory(source: ModelSpec, target: ModelSpec, config: CalibrationConfig) -> int:
    """All moments, the token table, and the working set of one document: both models' KV twice
    (rotated and not), the columns of the widest part twice, one block of products; and what rows
    are weighed by.
    """
    plans = plan_parts(source, target, config)
    kv = source.kv_bytes_per_token(4) + target.kv_bytes_per_token(4)
    columns = max(4 * (p.width + p.target_width) for p in plans)
    block = max(4 * min(ROWS, p.width) * max(p.width, p.target_width) for p in plans)
    document = config.window(source, target) * 2 * (kv + columns)
    moments = sum(_part_bytes(plan, config) for plan in plans)
    return moments + _table_bytes(target) + document + block + _regard_bytes(source, target, config)


def _part_bytes(plan: PartPlan, config: CalibrationConfig) -> int:
    """float64 gram, cross, and three vectors; what errors cost, where rows are weighed."""
    sums = 8 * (plan.width + 1) * (plan.width + plan.target_width) + 8 * plan.target_width
    if config.weighting == "uniform":
        return sums
    return sums + 8 * plan.target_width * (plan.target_width // len(plan.targets))


def _regard_bytes(source: ModelSpec, target: ModelSpec, config: CalibrationConfig) -> int:
    """Beside the document, while its last quarter is read on: a copy of the target's KV, all
    queries, the output projections and what a document's errors cost; and six matrices of shares of
    attention, or the next words' scores three times and what a gradient keeps.
    """
    if config.weighting == "uniform":
        return 0
    window, width = config.window(source, target), target.num_heads * target.head_dim
    read = window // 4
    queries = 4 * target.num_layers * width * read
    costs = 3 * 8 * target.num_layers * target.num_kv_heads * target.head_dim**2
    beside = window * target.kv_bytes_per_token(4) + queries + costs
    if config.weighting == "sensitivity":
        scores = 3 * 4 * target.vocab_size * read
        return beside + scores + _gradient_bytes(target, window - read, read)
    return beside + 6 * 4 * target.num_heads * min(QUERIES, read) * window


def _gradient_bytes(target: ModelSpec, held: int, read: int) -> int:
    """What is kept of a pass of ``read`` tokens over ``held`` ones until its gradient is taken: a
    layer's activations (14 of its width together, where its MLP has about 8/3 of that), keys and
    values repeated for every query head, and the mask; then the gradient of all that is held, as
    it comes, stacked, and turned back.
    """
    width = target.num_heads * target.head_dim
    layer = 14 * width * read + 2 * width * (held + read) + read * (held + read)
    return 4 * target.num_layers * layer + 3 * held * target.kv_bytes_per_token(4)


def _table_bytes(target: ModelSpec) -> int:
    return 4 * 2 * target.vocab_size * target.num_kv_heads * target.head_dim


def _parameters(spec: ModelSpec) -> int:
    """12 w^2 a layer, as attention and MLP have together in most models, w = heads x head_dim."""
    return 12 * spec.num_layers * (spec.num_heads * spec.head_dim) ** 2


def _flags(config: CalibrationConfig) -> list[str]:
    flags = [f"--scope {config.scope}"] if config.scope != "all" else []
    if config.joint:
        flags.append("--joint")
    return flags + [f"--layers {layer}" for layer in config.layers]
