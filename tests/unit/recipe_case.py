"""Every recipe at a size that takes seconds."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "fit": {"num_items": 12},
    "selection": {"num_items": 2, "context_tokens": 256},
    "report": {"num_items": 4, "context_tokens": 256, "questions": 4},
    "judged": {"rollout_steps": 2, "resamples": 200},
}
OWN: dict[str, dict[str, Any]] = {
    "copy-repair-speculate": {"answers": 2, "new_tokens": 6, "rounds": 1},
    "ridge-k": {"candidates": {"k": [1, 3], "ridge": [1.0e-3]}},
    "lowrank-residual": {
        "candidates": {"k": [2], "rank": [8]},
        "residual": {"steps": 3},
        "lessons": {"num_items": 4, "context_tokens": 100},
        "lengths": [80, 160],
    },
    "per-head-controls": {"k": [1, 2]},
    "pooled-multiturn": {
        "more_targets": [],
        "candidates": {"k": [2]},
        "failing_above": 1.0,
        "mlp": {"steps": 20, "hidden": 8, "batch_tokens": 32},
        "mlp_documents": 4,
        "conversations": {"num_items": 2, "context_tokens": 120, "questions": 4},
    },
}
