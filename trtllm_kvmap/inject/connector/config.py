"""What an operator writes into an engine's connector settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from trtllm_kvmap.artifact.container import read_digest
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import InputError


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """The settings of one engine, all of them JSON.

    A target needs ``kvmap`` (the file) and ``blocks``, a source ``exports``. These two are
    "module:name" of a SourceBlocks and of an Exports object that the operator's module makes; the
    engine's process imports it. ``first_tokens`` and ``repair_window`` as in spec.plan.
    """

    kvmap: str | None = None
    blocks: str | None = None
    exports: str | None = None
    first_tokens: int = 1
    repair_window: int = 32
    backend: str = "cpu"
    allow_unproven: bool = False

    @staticmethod
    def of(settings: Mapping[str, Any]) -> ConnectorConfig:
        """Raises InputError for settings that do not exist, or none that say what to do."""
        known = {field.name for field in fields(ConnectorConfig)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise InputError(
                f"The connector has no setting {', '.join(unknown)}; it has "
                f"{', '.join(sorted(known))}."
            )
        config = ConnectorConfig(**settings)
        if (config.kvmap is None) != (config.blocks is None) or not (
            config.kvmap or config.exports
        ):
            raise InputError(
                "The connector needs kvmap and blocks together (a target), or exports (a source), "
                f"or all three; got {dict(settings)}."
            )
        return config

    def load_map(self) -> tuple[KvMap, str]:
        """The map and its digest; errors as of KvMap.load."""
        if self.kvmap is None:
            raise InputError("The connector's settings name no kvmap.")
        path = Path(self.kvmap)
        return KvMap.load(path, allow_unproven=self.allow_unproven), read_digest(path)


def import_object(reference: str) -> Any:
    """The object "module:name". Raises InputError when there is none."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{reference!r} cannot be imported ({error}); give module:name of an object in a "
            f"module on the engine's path."
        ) from error
