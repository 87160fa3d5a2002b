"""What a host must be for mapped blocks to be right, checked once at its start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import MismatchError


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a host says of itself and of the source's host; a shell fills it from the engine's
    configuration.

    ``kv_shape`` is (num_layers, num_kv_heads, head_dim) of the pool of one rank;
    ``head_order_known`` that KV heads lie in the model's own order; ``windows`` the attention
    windows in tokens, None for full attention; ``layout_proven`` that a block written by the
    engine's own code was read back through our view of the pool; ``per_request_salt`` that the
    engine keeps blocks of different salts apart.
    """

    name: str
    kv_shape: tuple[int, int, int]
    tokens_per_block: int
    cache_dtype: str
    tensor_parallel: int = 1
    source_tensor_parallel: int = 1
    pipeline_parallel: int = 1
    head_order_known: bool = True
    beam_width: int = 1
    block_reuse: bool = True
    per_request_salt: bool = True
    host_offload: bool = False
    windows: tuple[int | None, ...] = (None,)
    layout_proven: bool = True
    speculation: bool = False


DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


def refusals(report: HostReport, kvmap: KvMap | None) -> Iterator[str]:
    """One sentence for everything that forbids to map into this host, or, without a map, to export
    from it.
    """
    if kvmap is not None and report.kv_shape != kvmap.target.kv_shape:
        yield (
            f"its pool holds (layers, KV heads, head_dim) = {report.kv_shape}, the map writes "
            f"{kvmap.target.kv_shape}: give the map of this target"
        )
    if report.cache_dtype not in DTYPES:
        yield f"its cache is {report.cache_dtype}: set it to one of {', '.join(DTYPES)}"
    if report.tensor_parallel != report.source_tensor_parallel:
        yield (
            f"tensor parallelism is {report.tensor_parallel} here and "
            f"{report.source_tensor_parallel} at the source: make them equal"
        )
    elif report.tensor_parallel > 1:
        yield (
            f"tensor parallelism is {report.tensor_parallel}, and a map reads source heads of "
            f"other ranks: run source and target with 1"
        )
    if not report.head_order_known:
        yield "its KV heads are not in the model's order: turn head reordering off"
    if report.pipeline_parallel != 1:
        yield f"pipeline parallelism is {report.pipeline_parallel}: a connector needs 1"
    if report.beam_width != 1:
        yield f"the beam width is {report.beam_width}: a connector needs 1"
    if not report.block_reuse:
        yield (
            "block reuse (prefix caching) is off, so that it asks no connector: turn it on; the "
            "salt keeps mapped blocks apart"
        )
    if not report.per_request_salt:
        yield "it knows no cache salt, so mapped blocks would answer exact look-ups: update it"
    if report.host_offload:
        yield "host offload of blocks is on, so block ids are not places in the pool: turn it off"
    if set(report.windows) != {None}:
        yield f"attention windows are {report.windows}: a map needs full attention in every layer"
    if kvmap is not None and kvmap.target.rope.length_dependent:
        yield (
            f"the target has {kvmap.target.rope.kind} RoPE, whose frequencies follow each "
            f"sequence's length, and engines keep one table: use the hf lane"
        )
    if not report.layout_proven:
        yield "its blocks do not read back as they were written: this pool layout is not known"
    if report.speculation:
        yield "speculation is on, and a connector's matched tokens are not proven with it: off"


def require_host(report: HostReport, kvmap: KvMap | None) -> None:
    """Raise MismatchError with every refusal, or return."""
    found = list(refusals(report, kvmap))
    if found:
        raise MismatchError(f"{report.name} cannot take mapped KV: {'; '.join(found)}.")
