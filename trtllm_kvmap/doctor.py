"""What can run on this machine, and whether two models can be mapped and how."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_kvmap.mapper.native import native_library
from trtllm_kvmap.models import ModelDescription
from trtllm_kvmap.spec.model import ModelSpec

# What is looked for: (name shown, module that must be importable, distribution that carries its
# version).
PARTS = (
    ("TensorRT", "tensorrt", "tensorrt"),
    ("TensorRT lean runtime", "tensorrt_lean_bindings", "tensorrt-lean-cu13-bindings"),
    ("TensorRT-LLM", "tensorrt_llm", "tensorrt-llm"),
    ("NIXL (CUDA 13)", "nixl_cu13", "nixl-cu13"),
    ("NIXL (CUDA 12)", "nixl_cu12", "nixl-cu12"),
    ("cuda-python", "cuda.bindings", "cuda-python"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: a part of the machine or a way to map, whether it can be used, and
    why.
    """

    name: str
    usable: bool
    detail: str


def examine_machine() -> list[Finding]:
    """What can run here. Looks, and starts nothing."""
    return [
        Finding(
            "CPU",
            True,
            f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
            f"{importlib.metadata.version('transformers')}, {torch.get_num_threads()} threads: "
            f"the hf lane runs.",
        ),
        _cuda(),
        _native(),
        *(_part(*part) for part in PARTS),
        _triton(),
    ]


def examine_pair(source: ModelDescription, target: ModelDescription) -> list[Finding]:
    """Whether ``source`` can be mapped to ``target``, one line per scope. Reads configurations, not
    weights.
    """
    same_tokens = source.tokenizer_digest == target.tokenizer_digest
    shared = Finding(
        "one tokenizer",
        same_tokens,
        "both read the same token ids"
        if same_tokens
        else "the tokenizers differ: these two cannot be mapped",
    )
    return [shared, *_scopes(source.spec, target.spec, same_tokens)]


def _scopes(source: ModelSpec, target: ModelSpec, same_tokens: bool) -> list[Finding]:
    heads = (
        f"{source.num_kv_heads} KV heads of {source.head_dim} -> "
        f"{target.num_kv_heads} of {target.head_dim}"
    )
    layers = f"{source.num_layers} -> {target.num_layers} layers"
    equal_heads = source.num_kv_heads == target.num_kv_heads
    equal = equal_heads and source.head_dim == target.head_dim
    return [
        Finding(
            "copy",
            same_tokens and equal,
            f"{heads}; copy needs them equal" if not equal else layers,
        ),
        Finding(
            "head",
            same_tokens and equal_heads,
            layers if equal_heads else f"{heads}; head needs equal head counts",
        ),
        Finding("pooled", same_tokens, f"{layers}, {heads}"),
        Finding("slice", same_tokens, f"{layers}, {heads}"),
    ]


def to_json(findings: list[Finding]) -> list[dict[str, Any]]:
    return [{"name": f.name, "usable": f.usable, "detail": f.detail} for f in findings]


def _cuda() -> Finding:
    if not torch.cuda.is_available():
        return Finding("CUDA", False, "torch sees no GPU")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Finding("CUDA", True, f"CUDA {torch.version.cuda}: {names}")


def _native() -> Finding:
    library = native_library()
    if library is None:
        return Finding(
            "native kernels",
            False,
            "not built, so there is no backend cuda: python build_scripts/build_native.py",
        )
    return Finding("native kernels", True, str(library))


def _part(name: str, module: str, distribution: str) -> Finding:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        return Finding(name, False, f"not installed (pip package {distribution})")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return Finding(name, True, version)


def _triton() -> Finding:
    binary = shutil.which("tritonserver")
    if binary is None:
        return Finding("Triton Inference Server", False, "no tritonserver on PATH")
    return Finding("Triton Inference Server", True, binary)
