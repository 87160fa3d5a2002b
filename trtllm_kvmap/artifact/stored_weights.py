"""The digest of a model's weights, taken of the files they are stored in: piece by piece, so that
neither the model nor a whole matrix of it is ever in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trtllm_kvmap.errors import MismatchError

PIECE_BYTES = 64 << 20  # of float32
PLAIN = {"F64", "F32", "F16", "BF16"}  # dtypes that loading does no more to than a cast


def stored_digest(
    files: Sequence[Path], shapes: Mapping[str, tuple[int, ...]], ties: Mapping[str, str]
) -> str:
    """sha256 of a model's state in float32, as ``models.fingerprint_of`` takes it of a loaded one.

    ``shapes`` are those of everything in the state; ``ties`` names the tensors that are not stored,
    each with the stored one that it is. Raises MismatchError when the files (safetensors) do not
    hold exactly these tensors as floats: loading would then rename, split or drop some, and what it
    does is not known here.
    """
    digest = hashlib.sha256()
    with ExitStack() as opened:
        stored = _stored(files, opened)
        if stored.keys() != shapes.keys() - ties.keys():
            odd = sorted(stored.keys() ^ (shapes.keys() - ties.keys()))
            raise MismatchError(
                f"{len(odd)} tensors are either in the files or in the model, such as {odd[0]}."
            )
        for name, shape in sorted(shapes.items()):
            tensor = stored[ties.get(name, name)]
            if tuple(tensor.get_shape()) != shape or tensor.get_dtype() not in PLAIN:
                raise MismatchError(
                    f"{name} is stored as {tensor.get_dtype()} {tensor.get_shape()}; the model has "
                    f"floats of {list(shape)}."
                )
            digest.update(f"\n{name} {torch.float32} {shape}\n".encode())
            for piece in _pieces(tensor, shape):
                numbers = piece.to(torch.float32).contiguous().view(-1)
                digest.update(numbers.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _stored(files: Sequence[Path], opened: ExitStack) -> dict[str, Any]:
    """Slices of every tensor, by name."""
    stored: dict[str, Any] = {}
    for path in files:
        try:
            file = opened.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise MismatchError(f"{path.name} is no whole safetensors file: {error}.") from error
        for name in file.keys():  # noqa: SIM118 - it is no dict
            if name in stored:
                raise MismatchError(f"{name} is stored in two files.")
            stored[name] = file.get_slice(name)
    return stored


def _pieces(tensor: Any, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Rows of a stored tensor, in order."""
    if not shape or not prod(shape):
        yield tensor[...]
        return
    step = max(1, PIECE_BYTES // (4 * prod(shape[1:])))
    for row in range(0, shape[0], step):
        yield tensor[row : row + step]
