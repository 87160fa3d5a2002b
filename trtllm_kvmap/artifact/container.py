"""The envelope of both file formats: safetensors with one JSON header, a version and a digest (see
FORMAT.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trtllm_kvmap.artifact.whole import whole_file
from trtllm_kvmap.errors import FormatError, NumericsError

HEADER_KEY = "trtllm_kvmap"
METADATA = "__metadata__"  # of safetensors, which also bounds its header
LONGEST_HEADER = 100_000_000


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
    Raises NumericsError for NaN or infinity in ``content``.
    """
    ready: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        # safetensors refuses one memory under two names; the second becomes a copy.
        ready[name] = dense.clone() if dense.data_ptr() in addresses else dense
        addresses.add(dense.data_ptr())
    digest = container_digest(kind, version, content, ready)
    header = {"kind": kind, "version": version, "digest": digest, "content": content}
    with whole_file(path) as temporary:
        save_file(ready, temporary, metadata={HEADER_KEY: _canonical(header)})
    return digest


def read_container(
    path: str | Path, kind: str, newest: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The content and tensors of ``path``, of any version up to ``newest``. Raises FormatError
    unless kind, version and digest all hold.
    """
    header, tensors = _read(Path(path))
    content = _content(path, header, kind, newest)
    try:
        digest = container_digest(kind, header["version"], content, tensors)
    except NumericsError as error:  # what write_container would not have written
        raise FormatError(f"{path} has a damaged header. Fetch or write it again.") from error
    if digest != header.get("digest"):
        raise FormatError(
            f"{path} does not match its digest: it was edited or damaged. Fetch or write it again."
        )
    return content, tensors


def read_content(path: str | Path, kind: str, newest: int) -> dict[str, Any]:
    """The content alone, without reading the tensors or proving the digest: to say what a file is
    before it is loaded.
    """
    return _content(path, _read_header(Path(path)), kind, newest)


def read_head(
    stream: BinaryIO, name: str, size: int, kind: str, newest: int
) -> tuple[dict[str, Any], str]:
    """The content and the digest that a stream over ``size`` bytes names, wherever it is stored,
    without the tensors. Raises FormatError also for a file shorter or longer than it says.
    """
    try:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(size, LONGEST_HEADER):
            raise ValueError("its header has no possible length")
        described = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for key, entry in described.items() if key != METADATA]
        if 8 + length + max(ends, default=0) != size:
            raise ValueError(f"it should have {8 + length + max(ends, default=0)} bytes")
        metadata = described.get(METADATA, {})
        header = _header(name, metadata)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{name} is not a whole safetensors file ({error}). Fetch or write it again."
        ) from error
    return _content(name, header, kind, newest), str(header.get("digest"))


def read_digest(path: str | Path) -> str:
    """What write_container returned when it wrote ``path``; the tensors are not read."""
    return str(_read_header(Path(path)).get("digest"))


def container_digest(
    kind: str, version: int, content: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> str:
    """What write_container would return, without a file: one tensor is held at a time. Raises
    NumericsError for NaN or infinity in ``content``.
    """
    sha = hashlib.sha256(_canonical([kind, version, content]).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _content(path: str | Path, header: dict[str, Any], kind: str, newest: int) -> dict[str, Any]:
    if header.get("kind") != kind:
        raise FormatError(f"{path} is a {header.get('kind')!r} file; a {kind!r} file is needed.")
    version = header.get("version")
    if type(version) is not int or not 1 <= version <= newest:
        raise FormatError(
            f"{path} has format version {version!r}; this package reads versions 1 to {newest}. "
            f"Write it again with this package, or install a newer one."
        )
    content = header.get("content")
    if not isinstance(content, dict):
        raise FormatError(f"{path} has a damaged header. Fetch or write it again.")
    return content


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _header(path, file.metadata() or {}), tensors


def _read_header(path: Path) -> dict[str, Any]:
    with _opened(path) as file:
        return _header(path, file.metadata() or {})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if path.is_dir():
        raise FormatError(f"{path} is a folder; give the file in it.")
    if not path.is_file():
        raise FormatError(f"There is no file {path}; give the path of one that is there.")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{path} is not a whole safetensors file ({error}). Fetch or write it again."
        ) from error


def _header(path: str | Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if HEADER_KEY not in metadata:
        raise FormatError(
            f"{path} was not written by trtllm_kvmap: its metadata has no {HEADER_KEY!r} entry."
        )
    try:
        header = json.loads(metadata[HEADER_KEY])
    except (ValueError, RecursionError) as error:  # deep brackets, or an endless integer
        raise FormatError(
            f"{path} has a damaged header ({error}). Fetch or write it again."
        ) from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} has a damaged header. Fetch or write it again.")
    return header


def _canonical(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise NumericsError(
            "A number that is to go into a file's header is NaN or infinite; measure it again, or "
            "leave it out."
        ) from error
