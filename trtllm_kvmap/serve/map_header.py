"""What is known of a map without reading its matrices: enough to route requests by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_kvmap.artifact.container import read_content
from trtllm_kvmap.artifact.kvmap import FORMAT_VERSION, KIND
from trtllm_kvmap.artifact.pair import pair_from_json
from trtllm_kvmap.errors import FormatError
from trtllm_kvmap.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class MapHeader:
    """``evidence`` as KvMap has it; ``map_digest``: what it must name; ``guarded``: whether the map
    carries a guard; ``recalling``: whether that guard weighs the recall as well.
    """

    source: ModelSpec
    target: ModelSpec
    evidence: dict[str, Any] | None
    map_digest: str | None
    guarded: bool
    recalling: bool = False

    @staticmethod
    def read(path: str | Path) -> MapHeader:
        """Raises FormatError for a file that is no map."""
        content = read_content(path, KIND, FORMAT_VERSION)
        try:
            pair, evidence = pair_from_json(content), content["evidence"]
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path}: the map is incomplete ({error}); fit it again.") from error
        guard = content.get("guard")
        recalling = isinstance(guard, dict) and guard.get("recalling") is not None
        return MapHeader(
            pair["source"],
            pair["target"],
            evidence,
            content.get("map_digest"),
            guard is not None,
            recalling,
        )
