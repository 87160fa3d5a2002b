"""Build a pipeline: a folder of three engines, the map they stand for, and a manifest.

Nothing appears under the folder's name before it is whole: everything is built beside it and moved.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtllm_kvmap.artifact.container import read_digest
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.manifest import (
    KVMAP,
    MAP_ENGINE,
    Manifest,
    record_files,
)
from trtllm_kvmap.engine.pair import read_side, require_pair
from trtllm_kvmap.engine.plan import EnginePlan, plan_pipeline
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import read_fingerprint


@dataclass(frozen=True, slots=True)
class Versions:
    """What builds the engines, as the manifest names it."""

    tensorrt_llm: str
    tensorrt: str
    device: str


class Builders(Protocol):
    """What compiles; builders.py is the one with TensorRT under it."""

    def versions(self) -> Versions: ...

    def build_model(self, plan: EnginePlan, dtype: str, folder: Path) -> None:
        """Write the engine of ``plan`` into ``folder``."""

    def build_map(self, kvmap: KvMap, config: PipelineConfig, path: Path) -> None:
        """Write the map engine to ``path``."""


def build_pipeline(
    source: str | Path,
    target: str | Path,
    kvmap_path: str | Path,
    out: str | Path,
    config: PipelineConfig,
    builders: Builders,
    *,
    allow_unproven: bool = False,
) -> Manifest:
    """Build the pipeline of two model folders and the map that was fitted for them into ``out``.

    Raises InputError when ``out`` exists or cannot be written, MismatchError for a pair or a map
    that does not fit, errors of KvMap.load, and whatever a builder raises; ``out`` is then not
    there.
    """
    out = Path(out)
    if out.exists():
        raise InputError(f"{out} exists; give the name of a folder that does not.")
    require_writable(out)
    kvmap = KvMap.load(kvmap_path, allow_unproven=allow_unproven)
    sides = read_side(source), read_side(target)
    require_pair(*sides, config, kvmap)
    kvmap.require_models(*(read_fingerprint(side.folder) for side in sides))
    plan = plan_pipeline(*sides, config, kvmap)
    with _folder_beside(out) as folder:
        for engine in (plan.source, plan.target):
            builders.build_model(engine, config.dtype, folder / engine.name)
        builders.build_map(kvmap, config, folder / MAP_ENGINE)
        shutil.copyfile(kvmap_path, folder / KVMAP)
        versions = builders.versions()
        manifest = Manifest(
            config=config,
            source=kvmap.source,
            target=kvmap.target,
            source_fingerprint=kvmap.source_fingerprint,
            target_fingerprint=kvmap.target_fingerprint,
            kvmap_digest=read_digest(folder / KVMAP),
            tensorrt_llm=versions.tensorrt_llm,
            tensorrt=versions.tensorrt,
            device=versions.device,
            files=record_files(folder),
        )
        manifest.write(folder)
    return manifest


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """A folder that takes the name ``out`` when the block ends well, and else is removed."""
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
