"""Reads every import of the package and fails when a floor is broken (ARCHITECTURE.md, "The
floors").

    python build_scripts/check_floors.py

A folder imports only from floors below its own; siblings on one floor never import each other; a
foreign name is imported only through its door.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "trtllm_kvmap"
FLOORS = {
    "errors": 1,
    "machine": 2,
    "spec": 2,
    "tiny": 2,
    "artifact": 3,
    "models": 3,
    "rotary": 3,
    "calibrate": 4,
    "fit": 4,
    "mapper": 4,
    "exchange": 4,
    "inject": 5,
    "decode": 6,
    "evaluate": 7,
    "refine": 7,
    "doctor": 8,
    "demo": 8,
    "engine": 8,
    "recipes": 8,
    "serve": 8,
    "cli": 9,
}
# Units of one floor that may meet: models/ puts the fingerprint of artifact/ on what it loads.
ALLOWED = {("models", "artifact")}
DOORS = {
    "transformers": ("models/", "calibrate/capture.py", "inject/hf_cache.py"),
    "vllm": ("inject/vllm/",),
    "lm_eval": ("evaluate/lm_eval_adapter.py",),
    "tensorrt_llm": ("inject/trtllm/host.py", "engine/"),
    "tensorrt": ("engine/",),
    "triton_python_backend_utils": ("serve/triton/",),
}


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == PACKAGE:
                yield from ((node.lineno, f"{PACKAGE}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def unit_of(relative: str) -> str:
    return relative.split("/")[0].removesuffix(".py")


def complaints(package: Path) -> Iterator[str]:
    """One sentence for every import in the folder ``package`` that breaks a floor or goes past a
    door.
    """
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).as_posix()
        unit = unit_of(relative)
        if relative == "__init__.py":
            continue  # the public names of the whole package, gathered from every floor
        if unit not in FLOORS:
            yield f"{relative}: {unit!r} has no floor; give it one in {Path(__file__).name}."
            continue
        for line, name in imported_names(ast.parse(path.read_text())):
            root, _, rest = name.partition(".")
            if root in DOORS and not relative.startswith(DOORS[root]):
                yield f"{relative}:{line}: {root} may be imported only in {', '.join(DOORS[root])}."
            if root != PACKAGE or not rest:
                continue
            other = rest.split(".")[0]
            same = other == unit or (unit, other) in ALLOWED
            if not same and FLOORS.get(other, 99) >= FLOORS[unit]:
                yield (
                    f"{relative}:{line}: {unit} (floor {FLOORS[unit]}) imports {other} "
                    f"(floor {FLOORS.get(other, 'unknown')}); only floors below may be imported."
                )


def main() -> int:
    found = list(complaints(ROOT / PACKAGE))
    for sentence in found:
        print(sentence)
    print(f"{len(found)} broken floors." if found else "Every floor holds.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
