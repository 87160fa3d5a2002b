"""What the scheduler's and the worker's half share in one process.

The engine makes both from its own arguments alone, in two threads at once, and hands neither to the
other; its connector configuration has no place for settings. So they are a JSON file, named by an
environment variable that every process of the engine inherits.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.connector.config import ConnectorConfig, import_object
from trtllm_kvmap.inject.trtllm.staged import StagedBlocks

SETTINGS = "TRTLLM_KVMAP_CONNECTOR"


@dataclass(frozen=True, slots=True)
class Target:
    """The settings of a target engine and what they name, loaded once."""

    config: ConnectorConfig
    kvmap: KvMap
    digest: str
    blocks: StagedBlocks


_targets: dict[str, Target] = {}
_lock = threading.Lock()


def read_config() -> tuple[str, ConnectorConfig]:
    """The settings' file and what it says. Raises InputError when there is none or it cannot be
    read.
    """
    path = os.environ.get(SETTINGS, "")
    if not path:
        raise InputError(
            f"The environment variable {SETTINGS} is not set; let it name a JSON file with the "
            f"connector's settings before the engine starts."
        )
    try:
        settings = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{SETTINGS} names {path}, which cannot be read as JSON ({error}); write the "
            f"connector's settings there."
        ) from error
    if not isinstance(settings, dict):
        raise InputError(f"{path} holds {type(settings).__name__}; it needs one JSON object.")
    return path, ConnectorConfig.of(settings)


def this_target() -> Target:
    """What this process maps with; the same object for both halves."""
    path, config = read_config()
    if not config.blocks:
        raise InputError(
            f"{path} names no blocks, so this engine is no target; add kvmap and blocks."
        )
    with _lock:
        if path not in _targets:
            kvmap, digest = config.load_map()
            blocks = StagedBlocks(import_object(config.blocks), kvmap)
            _targets[path] = Target(config, kvmap, digest, blocks)
        return _targets[path]
