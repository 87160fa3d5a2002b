"""A built pipeline, started: two engines and the relay between them, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.engine import host
from trtllm_kvmap.engine.engine_process import Engine
from trtllm_kvmap.engine.executor import PipelineExecutor
from trtllm_kvmap.engine.manifest import (
    KVMAP,
    MAP_ENGINE,
    SOURCE,
    TARGET,
    Manifest,
    read_manifest,
)
from trtllm_kvmap.engine.map_runner import MapRunner
from trtllm_kvmap.engine.ports import map_ports
from trtllm_kvmap.engine.relay import EngineRelay
from trtllm_kvmap.engine.relay_pool import RelayPool
from trtllm_kvmap.engine.source_stage import EngineSource
from trtllm_kvmap.engine.target_stage import EngineTarget
from trtllm_kvmap.errors import MismatchError


def require_versions(folder: Path, manifest: Manifest) -> None:
    """Raise MismatchError unless this TensorRT-LLM and TensorRT built the engines."""
    found = {"tensorrt_llm": host.VERSION, "tensorrt": host.TENSORRT_VERSION}
    built = {name: getattr(manifest, name) for name in found}
    if found != built:
        raise MismatchError(
            f"{folder} was built with {built} and this is {found}; an engine runs under what built "
            f"it. Build the pipeline again here."
        )


@contextmanager
def open_pipeline(
    folder: str | Path, *, allow_unproven: bool = False
) -> Iterator[PipelineExecutor]:
    """The executor of a pipeline folder; engines are shut down when the block ends.

    Every file is read and compared with the manifest first. Raises FormatError for a folder that is
    not whole, MismatchError for one of other versions, UnprovenError for an unproven map.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    require_versions(folder, manifest)
    kvmap = KvMap.load(folder / KVMAP, allow_unproven=allow_unproven)
    kvmap.require_models(manifest.source_fingerprint, manifest.target_fingerprint)
    config = manifest.config
    ports = map_ports(kvmap.source, kvmap.target, config, reads_token_ids=kvmap.reads_token_ids)
    with contextlib.ExitStack() as stack:
        relay = EngineRelay(
            kvmap,
            config,
            RelayPool(kvmap.source, config),
            RelayPool(kvmap.target, config),
            MapRunner(folder / MAP_ENGINE, ports, config),
        )
        stack.callback(relay.close)
        source = Engine(folder / SOURCE, config, config.max_tokens)
        stack.callback(source.shutdown)
        target = Engine(folder / TARGET, config, config.target_max_tokens)
        stack.callback(target.shutdown)
        executor = PipelineExecutor(
            manifest, EngineSource(source), relay, EngineTarget(target, config)
        )
        stack.callback(executor.shutdown)
        yield executor
