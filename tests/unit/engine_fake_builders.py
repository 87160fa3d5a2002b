"""FAKE builders: files named as TensorRT-LLM's would be, with nothing in them to run."""

from __future__ import annotations

from pathlib import Path

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.engine.build import Versions
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.plan import EnginePlan

VERSIONS = Versions("1.2.1", "10.14.1", "a FAKE")


class FakeBuilders:
    """``fail_at`` is the part that cannot be built: source, target or map."""

    def __init__(self, fail_at: str = "") -> None:
        self.fail_at, self.built = fail_at, []

    def versions(self) -> Versions:
        return VERSIONS

    def build_model(self, plan: EnginePlan, dtype: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(str(plan.build))
        self._begin(plan.name)
        (folder / "rank0.engine").write_bytes(f"FAKE {plan.side.spec.name} {dtype}".encode())

    def build_map(self, kvmap: KvMap, config: PipelineConfig, path: Path) -> None:
        self._begin("map")
        path.write_bytes(b"FAKE map engine")

    def _begin(self, what: str) -> None:
        self.built.append(what)
        if what == self.fail_at:
            raise RuntimeError(f"{what} cannot be built")
