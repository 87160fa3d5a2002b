"""The command that asks again what a report was asked."""

from __future__ import annotations

import shlex
from typing import Any

from trtllm_kvmap.evaluate.report.report import Report

# Settings of a report's config by the field that they were given in.
NAMES = {"first_tokens": "S", "repair_window": "N"}
TASK = ("task", "data", "num_items", "skip", "context_tokens", "scored_tokens", "questions", "seed")
SETTINGS = ("metric", "first_tokens", "repair_window", "rollout_steps", "resamples", "backend")


def command(report: Report) -> str:
    """`trtllm-kvmap evaluate` with every flag that the report knows; the map and the models are
    named, since their files may lie anywhere. "" where the items had no task (Python gave them) or
    the report does not say.
    """
    config = report.config
    if config.get("task") is None:
        return ""
    asked = config | {"context_tokens": config["context_tokens"]["asked"]}
    given: dict[str, Any] = {name: config[name] for name in ("source", "target")}
    given |= {name: asked[name] for name in TASK}
    given |= {name: config[NAMES.get(name, name)] for name in SETTINGS}
    for gate in report.gates:
        given[f"{'min' if gate['side'] == 'at least' else 'max'}_{gate['name']}"] = gate["limit"]
    words = ["trtllm-kvmap", "evaluate", "MAP"]
    for name, value in given.items():
        if value != "":
            words += [_flag(name), str(value)]
    words += [_flag("length_normalised")] * bool(config["length_normalised"])
    return shlex.join(words)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
