"""What a pipeline weighs, in bytes, before anything of it is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trtllm_kvmap.artifact.kvmap import FLOAT8, KvMap
from trtllm_kvmap.engine.config import BYTES_PER_ELEMENT, PipelineConfig
from trtllm_kvmap.engine.pair import Side
from trtllm_kvmap.spec.model import ModelSpec

# As cpp/kernels/workspaceLayout.h and plugins/kvMapPlugin/callWorkspace.cpp lay a workspace out.
CHUNK_TOKENS = 2048
TILE_ROWS = 256
SMALL_ROWS, TILE_COLUMNS, BUSY_TILES = 64, 128, 512
SLICE_GRANULARITY = 8
ALIGNMENT = 256
TOKEN_ROW_BYTES = 24
INDEX_ARRAYS, INDEX_BYTES = 3, 4
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PipelineSizes:
    """Bytes. An engine's own activations are known to TensorRT alone, and not counted;
    ``map_workspace`` is an upper bound. ``map_token_table`` is of a map that reads token ids.
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


@dataclass(frozen=True, slots=True)
class MapShape:
    """What of a map its workspace depends on: distinct slices of source and target that matrices
    read, and tiles of 128 columns that they write.
    """

    source_slices: int
    own_slices: int
    tiles: int

    @staticmethod
    def of(kvmap: KvMap) -> MapShape:
        groups = [group for group in kvmap.groups if not group.copies]
        read = {s for group in groups for s in group.slices}
        own = sum(s.origin == "target" for s in read)
        head_dim = kvmap.target.head_dim
        return MapShape(
            len(read) - own,
            own,
            sum(-(-len(group.heads) * head_dim // TILE_COLUMNS) for group in groups),
        )


def map_workspace(shape: MapShape, source: ModelSpec, target: ModelSpec, max_tokens: int) -> int:
    """An upper bound: un-rotated slices of one chunk and where its tokens lie, or, for a handful of
    tokens, the partial sums of a product that was split.
    """

    def held(rows: int) -> int:
        widths = (
            count * (-(-spec.head_dim // SLICE_GRANULARITY) * SLICE_GRANULARITY)
            for count, spec in ((shape.source_slices, source), (shape.own_slices, target))
        )
        return rows * (TOKEN_ROW_BYTES + sum(widths) * BYTES_PER_ELEMENT) + 4 * ALIGNMENT

    chunk = min(-(-max_tokens // TILE_ROWS) * TILE_ROWS, CHUNK_TOKENS)
    splits = -(-BUSY_TILES // shape.tiles) if shape.tiles else 0
    partials = splits * shape.tiles * SMALL_ROWS * TILE_COLUMNS * FLOAT_BYTES if splits > 1 else 0
    indices = INDEX_ARRAYS * (max_tokens * INDEX_BYTES + ALIGNMENT)
    return indices + max(held(chunk), held(SMALL_ROWS) + partials)


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
        heads = 2 * other.num_layers * other.num_kv_heads
        tiles = heads * -(-other.head_dim // TILE_COLUMNS)
        shape = MapShape(2 * spec.num_layers * spec.num_kv_heads, 0, tiles)
        table = 0
    else:
        parameters = kvmap.num_parameters
        weights = [group.weight for group in kvmap.groups if group.weight is not None]
        if weights and all(weight.dtype == FLOAT8 for weight in weights):
            weight_bytes = FLOAT8.itemsize
        shape = MapShape.of(kvmap)
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
        map_workspace=map_workspace(shape, spec, other, config.max_tokens),
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
