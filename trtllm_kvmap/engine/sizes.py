"""What a pipeline weighs, in bytes, before anything of it is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trtllm_kvmap.artifact.kvmap import FLOAT8, KvMap
from trtllm_kvmap.engine.config import BYTES_PER_ELEMENT, PipelineConfig
from trtllm_kvmap.engine.pair import Side
from trtllm_kvmap.spec.model import ModelSpec

# As cpp/kernels/workspaceLayout.h and plugins/kvMapPlugin/callWorkspace.cpp lay it out.
CHUNK_TOKENS = 2048
TILE_ROWS = 256
TOKEN_ROW_BYTES = 24
INDEX_ARRAYS = 3
INDEX_BYTES = 4
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PipelineSizes:
    """Bytes. Engines and pools are of one GPU each; an engine's own activations are known to
    TensorRT alone, and not counted.
    """

    source_weights: int
    target_weights: int
    map_weights: int
    map_rope_tables: int
    map_token_table: int
    map_workspace: int
    source_pool: int
    target_pool: int
    relay_source_pool: int
    relay_target_pool: int
    transfer_buffers: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def slice_map_parameters(source: ModelSpec, target: ModelSpec, n: int) -> int:
    """Of a map of scope ``slice`` with ``n`` source slices for every target head."""
    heads = 2 * target.num_layers * target.num_kv_heads
    return heads * target.head_dim * (n * source.head_dim + 1)


def map_workspace(kvmap_slices: int, slice_width: int, max_tokens: int) -> int:
    """Un-rotated source slices of one chunk in the compute type, and where its tokens lie."""
    chunk = min(-(-max_tokens // TILE_ROWS) * TILE_ROWS, CHUNK_TOKENS)
    slices = kvmap_slices * chunk * slice_width * BYTES_PER_ELEMENT
    return slices + chunk * TOKEN_ROW_BYTES + INDEX_ARRAYS * max_tokens * INDEX_BYTES


def pool_bytes(spec: ModelSpec, blocks: int, tokens_per_block: int) -> int:
    """Of a pool [blocks, num_layers, 2, num_kv_heads, tokens_per_block, head_dim]."""
    return blocks * tokens_per_block * spec.kv_bytes_per_token(BYTES_PER_ELEMENT)


def measure(
    source: Side, target: Side, config: PipelineConfig, kvmap: KvMap | None, n: int
) -> PipelineSizes:
    """``n`` slices per target head stand for the map where there is none yet."""
    spec, other = source.spec, target.spec
    weight_bytes = BYTES_PER_ELEMENT
    if kvmap is None:
        parameters = slice_map_parameters(spec, other, n)
        slices = 2 * spec.num_layers * spec.num_kv_heads
        table = 0
    else:
        parameters = kvmap.num_parameters
        weights = [group.weight for group in kvmap.groups if group.weight is not None]
        if weights and all(weight.dtype == FLOAT8 for weight in weights):
            weight_bytes = FLOAT8.itemsize
        slices = len({s for group in kvmap.groups if not group.copies for s in group.slices})
        held = kvmap.token_table if kvmap.reads_token_ids else None
        table = 0 if held is None else FLOAT_BYTES * (held.keys.numel() + held.values.numel())
    in_flight = config.max_batch_size * config.max_blocks
    in_relay = config.relay_requests * config.max_blocks
    size = config.tokens_per_block
    transfers = config.max_blocks * size * BYTES_PER_ELEMENT
    return PipelineSizes(
        source_weights=source.num_parameters * BYTES_PER_ELEMENT,
        target_weights=target.num_parameters * BYTES_PER_ELEMENT,
        map_weights=parameters * weight_bytes,
        map_rope_tables=FLOAT_BYTES
        * config.max_tokens
        * (spec.rope.rotary_dim + other.rope.rotary_dim),
        map_token_table=table,
        map_workspace=map_workspace(slices, max(spec.head_dim, other.head_dim), config.max_tokens),
        source_pool=pool_bytes(spec, in_flight, size),
        target_pool=pool_bytes(
            other,
            config.max_batch_size * -(-config.target_max_tokens // size),
            size,
        ),
        relay_source_pool=pool_bytes(spec, in_relay, size),
        relay_target_pool=pool_bytes(other, in_relay, size),
        # Each of the four ends keeps a buffer of the longest sequence.
        transfer_buffers=2
        * transfers
        * sum(
            s.kv_bytes_per_token(1)  # elements per token
            for s in (spec, other)
        ),
    )
