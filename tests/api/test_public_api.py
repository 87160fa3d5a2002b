"""The public names and how they are called, as a golden: a change here is a change for users.

python tests/api/test_public_api.py        writes the golden again
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from typer.main import get_command

import trtllm_kvmap
from trtllm_kvmap.cli.verbs import app

GOLDEN = Path(__file__).with_name("public_api.json")


def described() -> dict[str, dict[str, object]]:
    names = {name: getattr(trtllm_kvmap, name) for name in trtllm_kvmap.__all__}
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    return {
        "python": {name: signature(value) for name, value in names.items()},
        "methods": {
            name: {
                method: signature(function)
                for method, function in inspect.getmembers(value, inspect.isroutine)
                if not method.startswith("_") and method in vars(value)
            }
            for name, value in names.items()
            if inspect.isclass(value) and not issubclass(value, Exception)
        },
        "verbs": {
            name: sorted(option for p in verb.params for option in p.opts)
            for name, verb in sorted(flat(verbs).items())
        },
    }


def flat(verbs: dict[str, Any]) -> dict[str, Any]:
    """A verb of a group is named with it: ``registry list``."""
    found = {}
    for name, verb in verbs.items():
        nested = flat(getattr(verb, "commands", {}))
        found |= {f"{name} {inner}": each for inner, each in nested.items()} or {name: verb}
    return found


def signature(value: object) -> str:
    """Parameter names and which of them have defaults; annotations are mypy's business."""
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a cached property, an exception class
        return ""
    return ", ".join(
        f"{'*' if p.kind is p.KEYWORD_ONLY else ''}{p.name}{'' if p.default is p.empty else '='}"
        for p in parameters
    )


def test_the_public_api_is_the_golden() -> None:
    assert described() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(described(), indent=1) + "\n")
