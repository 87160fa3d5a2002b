"""What was asked of which map, and by which versions: what it takes to ask the same again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, astuple, fields
from typing import Any

import torch

import trtllm_kvmap
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item


def asked(items: Sequence[Item], task: TaskConfig | None) -> dict[str, Any]:
    """JSON entries of a report's ``config``: the fields of ``task`` (each None for items that no
    task named), and what the ``items`` really are: how many, their questions, the lengths of their
    contexts in tokens, and their digest.
    """
    named = dict.fromkeys(f.name for f in fields(TaskConfig)) if task is None else asdict(task)
    wanted = named.pop("context_tokens")
    lengths = [len(item.context) for item in items]
    return {
        **named,
        "num_items": len(items),
        "num_questions": sum(len(item.questions) for item in items),
        "context_tokens": {"shortest": min(lengths), "longest": max(lengths), "asked": wanted},
        "items_digest": items_digest(items),
    }


def items_digest(items: Sequence[Item]) -> str:
    """SHA-256 of the items in order, all their token ids and labels, as JSON without spaces."""
    said = json.dumps([astuple(item) for item in items], separators=(",", ":"), default=int)
    return hashlib.sha256(said.encode()).hexdigest()


def versions() -> dict[str, str]:
    """What computed the figures, by name."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
        "trtllm_kvmap": trtllm_kvmap.__version__,
    }
