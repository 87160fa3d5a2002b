"""The envelope of both file formats: safetensors with one JSON header, a version and a digest (see
FORMAT.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trtllm_kvmap.artifact.whole import whole_file
from trtllm_kvmap.errors import FormatError

HEADER_KEY = "trtllm_kvmap"


def write_container(
    path: str | Path,
    kind: str,
    version: int,
    content: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> str:
    """Write ``content`` (JSON) and ``tensors`` to ``path``; returns the digest. Equal input gives
    equal bytes.

    The file appears under its name only when it is complete: it is written beside it and renamed.
    """
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digest = _digest(kind, version, content, ready)
    header = {"kind": kind, "version": version, "digest": digest, "content": content}
    with whole_file(path) as temporary:
        save_file(ready, temporary, metadata={HEADER_KEY: _canonical(header)})
    return digest


def read_container(
    path: str | Path, kind: str, version: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The content and tensors of ``path``. Raises FormatError unless kind, version and digest all
    hold.
    """
    header, tensors = _read(Path(path))
    if header.get("kind") != kind:
        raise FormatError(f"{path} is a {header.get('kind')!r} file; a {kind!r} file is needed.")
    if header.get("version") != version:
        raise FormatError(
            f"{path} has format version {header.get('version')}; this package reads version "
            f"{version}. "
            f"Write it again with this package."
        )
    content = header.get("content")
    if not isinstance(content, dict) or _digest(kind, version, content, tensors) != header.get(
        "digest"
    ):
        raise FormatError(
            f"{path} does not match its digest: it was edited or damaged. Fetch or write it again."
        )
    return content, tensors


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise FormatError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{path} is not a whole safetensors file ({error}). Fetch or write it again."
        ) from error
    if HEADER_KEY not in metadata:
        raise FormatError(
            f"{path} was not written by trtllm_kvmap: its metadata has no {HEADER_KEY!r} entry."
        )
    try:
        header = json.loads(metadata[HEADER_KEY])
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{path} has a damaged header ({error}). Fetch or write it again."
        ) from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} has a damaged header. Fetch or write it again.")
    return header, tensors


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(
    kind: str, version: int, content: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> str:
    sha = hashlib.sha256(_canonical([kind, version, content]).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
