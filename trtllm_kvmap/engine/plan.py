"""The plan of a pipeline: what will be built from what, every shape and byte, before it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.pair import Side, refusals
from trtllm_kvmap.engine.ports import OUTPUT, Port, map_ports
from trtllm_kvmap.engine.sizes import PipelineSizes, measure

TRTLLM_VERSION = "1.2.1"
UNVERIFIED = (
    f"Unverified: written against the sources of TensorRT-LLM {TRTLLM_VERSION} and run under a "
    f"fake alone."
)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine of TensorRT-LLM: keyword arguments of its BuildConfig and PluginConfig."""

    name: str
    side: Side
    build: dict[str, Any]
    plugins: dict[str, Any]

    @property
    def command(self) -> str:
        """What trtllm-build would be told, had the weights been converted by hand."""
        words = ["trtllm-build", "--checkpoint_dir", f"checkpoints/{self.name}"]
        words += ["--output_dir", self.name]
        for key, value in (self.build | self.plugins).items():
            words += [f"--{key}", "enable" if value is True else str(value)]
        return shlex.join(words)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """``found`` holds a sentence for everything that forbids to build it."""

    source: EnginePlan
    target: EnginePlan
    ports: tuple[Port, ...]
    sizes: PipelineSizes
    config: PipelineConfig
    map_of: str
    found: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "verified": False,
            "note": UNVERIFIED,
            "engines": [
                {
                    "name": engine.name,
                    "model": str(engine.side.folder),
                    "kv_shape": list(engine.side.spec.kv_shape),
                    "parameters": engine.side.num_parameters,
                    "build_config": engine.build,
                    "plugin_config": engine.plugins,
                    "command": engine.command,
                }
                for engine in (self.source, self.target)
            ],
            "map": {
                "of": self.map_of,
                "inputs": [
                    {"name": port.name, "dtype": port.dtype, "shape": list(port.shape)}
                    for port in self.ports
                ],
                "output": {"name": OUTPUT, "dtype": "int32", "shape": [1]},
            },
            "config": self.config.to_json(),
            "bytes": self.sizes.to_json(),
            "refusals": list(self.found),
        }

    def lines(self) -> Iterator[str]:
        """The same for a person."""
        yield UNVERIFIED
        for engine in (self.source, self.target):
            layers, heads, head_dim = engine.side.spec.kv_shape
            yield ""
            yield (
                f"{engine.name}: {engine.side.folder}, {engine.side.num_parameters:,} parameters, "
                f"KV of {layers} layers x {heads} heads x {head_dim}"
            )
            yield f"  {engine.command}"
        yield ""
        yield f"map: {self.map_of}"
        for port in self.ports:
            where = "host" if port.on_host else "device"
            yield f"  {port.name:40} {port.dtype:6} {list(port.shape)} {where}"
        yield f"  -> {OUTPUT:37} int32  [1] device"
        yield ""
        for name, count in self.sizes.to_json().items():
            yield f"{name:20} {count:>18,} bytes"
        yield ""
        if self.found:
            yield "No pipeline can be built:"
            yield from (f"  {sentence}" for sentence in self.found)
        else:
            yield "The pair can be built."


def plan_pipeline(
    source: Side, target: Side, config: PipelineConfig, kvmap: KvMap | None = None, n: int = 8
) -> BuildPlan:
    """Pure arithmetic; nothing is written. Without a ``kvmap`` the map is taken to be one of scope
    ``slice`` with ``n`` slices.
    """
    shared = {
        "max_batch_size": config.max_batch_size,
        "max_input_len": config.max_tokens,
        "max_seq_len": config.max_tokens,
        "max_num_tokens": config.max_num_tokens,
        "max_beam_width": 1,
    }
    verifier = {
        "speculative_decoding_mode": "draft_tokens_external",
        "max_draft_len": config.max_draft_len,
    }
    plugins = {
        "gpt_attention_plugin": config.dtype,
        "gemm_plugin": config.dtype,
        "paged_kv_cache": True,
        "tokens_per_block": config.tokens_per_block,
        "use_paged_context_fmha": True,
    }
    return BuildPlan(
        EnginePlan("source", source, shared, plugins),
        EnginePlan("target", target, shared | (verifier if config.max_draft_len else {}), plugins),
        map_ports(
            source.spec,
            target.spec,
            config,
            reads_token_ids=kvmap is not None and kvmap.reads_token_ids,
        ),
        measure(source, target, config, kvmap, n),
        config,
        f"scope slice, {n} slices per target head (none was given)"
        if kvmap is None
        else f"scope {kvmap.scope}, {kvmap.num_parameters:,} parameters",
        tuple(refusals(source, target, config, kvmap)),
    )
