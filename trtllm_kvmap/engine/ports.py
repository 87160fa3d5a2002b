"""The inputs and the output of the map engine: the plugin's paged mode, one sequence an enqueue.

Names, types and order are those of plugins/kvMapPlugin/README.md. What a map holds (the packed map,
the RoPE tables, the target's layer-0 table) is constants of the network; what changes from call to
call is a port.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.spec.model import ModelSpec

CONSTANTS = ("packed_map", "source_rope", "target_rope")
TABLE = ("token_table_keys", "token_table_values")
OUTPUT = "mapped_lengths"


@dataclass(frozen=True, slots=True)
class Port:
    """An input of the engine. ``least`` and ``most`` are equal shapes but for ``token_ids``;
    ``on_host`` says that its address is one of CPU memory.
    """

    name: str
    dtype: str
    least: tuple[int, ...]
    most: tuple[int, ...]

    @property
    def on_host(self) -> bool:
        return self.name.startswith("host_")

    @property
    def shape(self) -> tuple[int, ...]:
        """-1 where the shape changes from call to call."""
        return tuple(a if a == b else -1 for a, b in zip(self.least, self.most, strict=True))


def _static(name: str, dtype: str, *shape: int) -> Port:
    return Port(name, dtype, shape, shape)


def side_ports(side: str, num_layers: int, max_blocks: int) -> tuple[Port, ...]:
    """What TensorRT-LLM's KV cache manager says of one pool, as its attention plugin is told."""
    offsets = (1, 1, 2, max_blocks)
    return (
        _static(f"host_{side}_kv_cache_pool_pointers", "int64", 1, 2),
        _static(f"host_{side}_kv_cache_pool_mapping", "int32", num_layers, 2),
        _static(f"host_{side}_kv_cache_block_offsets", "int32", *offsets),
        _static(f"{side}_kv_cache_block_offsets", "int32", *offsets),
    )


def map_ports(
    source: ModelSpec, target: ModelSpec, config: PipelineConfig, *, reads_token_ids: bool
) -> tuple[Port, ...]:
    """The engine's inputs in the plugin's order (constants left out)."""
    ports = (
        _static("host_spans", "int32", 1, 2),
        _static("host_num_blocks", "int32", 2),
        *side_ports("source", source.num_layers, config.max_blocks),
        *side_ports("target", target.num_layers, config.max_blocks),
    )
    if reads_token_ids:
        ports += (Port("token_ids", "int32", (0,), (config.max_tokens,)),)
    return ports
