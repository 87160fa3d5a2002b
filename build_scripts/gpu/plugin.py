"""The TensorRT plugin's enqueue on a device, called through its own interfaces. No TensorRT runtime
is needed: creators are taken from the library itself.

python build_scripts/gpu/plugin.py --library build/native [--json FILE]

Builds the plugin and its harness beside the torch operators of --library, offline, with the headers
of TensorRT that are at hand. --built FOLDER takes one that is there; --device cpu the plugin whose
kernels run on the emulator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "build_scripts"),
    *(str(ROOT / "tests" / folder) for folder in ("conformance", "cpp", "tensorrt")),
]

from cases import CASES, SECONDS  # noqa: E402
from expected import ABSOLUTE, expect  # noqa: E402
from harness import Registry  # noqa: E402
from plugin_case import PluginCase, paged_case  # noqa: E402

from gpu.conformance import DECLARED, raw  # noqa: E402
from trtllm_kvmap.mapper.native import NAME  # noqa: E402

HARNESS = "libtrtllm_kvmap_harness.so"
PLUGINS = {"cuda": "libtrtllm_kvmap_plugin.so", "cpu": "libtrtllm_kvmap_plugin_emulated.so"}
TARGETS = ("trtllm_kvmap_plugin", "trtllm_kvmap_harness")
# (case, what the map is packed for)
RUNS = (
    ("plain", "float32"),
    ("slice-with-own-layer-0", "float32"),
    ("copy-float8-rescaled", "float32"),
    ("bfloat16-to-bfloat16", "bfloat16"),
    ("float16-to-float16", "float16"),
    ("float8_e4m3fn-to-bfloat16", "bfloat16"),
    ("float8-weights-pooled", "float32"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--library", type=Path, required=True, help=f"the folder of {NAME}")
    parser.add_argument("--built", type=Path, help="the folder of a plugin and its harness")
    parser.add_argument("--device", default="cuda", choices=PLUGINS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.built is None and build(options.library):
        return 1
    folder = options.built or options.library
    torch.ops.load_library(str(options.library / NAME))
    registry = Registry.alone(folder / HARNESS, folder / PLUGINS[options.device])
    complaints = {}
    for name, compute in RUNS:
        case = next(case for case in (*CASES, *SECONDS) if case.id == name)
        complaint = enqueue(registry, paged_case(case, compute=compute), compute, options.device)
        print(f"{name}: {complaint or 'as the formula says'}")
        if complaint:
            complaints[name] = complaint
    if options.json:
        options.json.write_text(json.dumps({"runs": len(RUNS), "failures": complaints}))
    return 1 if complaints else 0


def build(output: Path) -> int:
    command = [sys.executable, str(ROOT / "build_scripts" / "build_native.py"), "--offline"]
    command += ["--python", sys.executable, "--architectures", "native", "--tests"]
    command += ["--output", str(output), "--target", *TARGETS]
    return subprocess.run(command, check=False).returncode


def enqueue(registry: Registry, case: PluginCase, compute: str, device: str) -> str:
    """What was wrong with it, or nothing."""
    plugin = registry.create(case.fields)
    if plugin is None:
        return "the creator refused the fields"
    if plugin.change_shape(case.tensors) != 0:
        return "the plugin refused the shapes"
    before = raw(case.built.target_memory)
    # On the device: the pools, and every input but those that TensorRT keeps on the host.
    pools = {"source": case.built.source_memory, "target": case.built.target_memory}
    pools = {side: memory.to(device) for side, memory in pools.items()}
    inputs = dict(case.arrays)
    for side, memory in pools.items():
        pointers = np.array([[memory.data_ptr(), 0]], np.int64)
        inputs[f"host_{side}_kv_cache_pool_pointers"] = pointers
    for name, value in inputs.items():
        if not name.startswith("host_"):
            inputs[name] = torch.as_tensor(value).to(device)
    output = torch.full((len(case.output),), -7, dtype=torch.int32, device=device)
    roomy = torch.empty(plugin.workspace_size(case.tensors) + 256, dtype=torch.uint8, device=device)
    workspace = roomy.data_ptr() + -roomy.data_ptr() % 256
    addresses = [
        value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data
        for value in inputs.values()
    ]
    status = plugin.enqueue(case.tensors, addresses, output.data_ptr(), workspace)
    if device == "cuda":
        torch.cuda.synchronize()
    if status != 0:
        return f"enqueue ended with {status}"
    case.built.target_memory.copy_(pools["target"])
    if output.tolist() != [case.case.num_tokens]:
        return f"it counted {output.tolist()} tokens"
    return difference(case, before, compute)


def difference(case: PluginCase, before: torch.Tensor, compute: str) -> str:
    memory = case.built.target_memory
    expected = expect(case.case, case.built)
    if not torch.equal(raw(memory)[~expected.written], before[~expected.written]):
        return "another slot changed"
    found, wanted = memory.double()[expected.written], expected.values[expected.written]
    declared = DECLARED[getattr(torch, compute)]
    allowed = ABSOLUTE[case.case.target.dtype] + declared
    allowed = allowed + wanted.abs() * (torch.finfo(memory.dtype).eps + declared)
    ratio = float(((found - wanted).abs() / allowed).max())
    return "" if ratio <= 1.0 else f"off by {ratio:.3g} times what is allowed"


if __name__ == "__main__":
    sys.exit(main())
