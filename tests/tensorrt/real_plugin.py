"""Run by test_plugin.py: the plugin with device code, on a machine without a GPU. Prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "conformance"), str(ROOT / "tests" / "tensorrt")]

import torch  # noqa: E402
from cases import BASE  # noqa: E402
from harness import Registry  # noqa: E402
from plugin_case import paged_case  # noqa: E402


def main() -> None:
    harness, runtime, plugin = (Path(argument) for argument in sys.argv[1:])
    torch.ops.load_library(str(harness.parent / "libtrtllm_kvmap_torch.so"))
    registry = Registry.open(harness, runtime, plugin)
    case = paged_case(BASE)
    made = registry.create(case.fields)
    assert made is not None
    case.give_workspace(made.workspace_size(case.tensors))
    before = case.built.target_memory.clone()
    status = made.enqueue(
        case.tensors, case.addresses(), case.output.ctypes.data, case.workspace.ctypes.data
    )
    written = not torch.equal(
        before.view(torch.uint8), case.built.target_memory.view(torch.uint8)
    ) or bool(np.any(case.output != -7))
    print(
        json.dumps(
            {
                "version": registry.version,
                "creators": creators(),
                "enqueue": status,
                "written": written,
            }
        )
    )


def creators() -> list[str]:
    """What TensorRT's own Python sees in the registry."""
    import tensorrt_lean_bindings

    registry = tensorrt_lean_bindings.get_plugin_registry()
    return [creator.name for creator in registry.all_creators]


if __name__ == "__main__":
    main()
