"""One 64-bit number per block, by which the target knows that it read what the source had.

Against torn reads, reused memory and broken links, not against a forger: the numbers travel beside
the blocks' addresses, on the same channel.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trtllm_kvmap.errors import InputError

try:
    from xxhash import xxh3_64
except ImportError:  # not a dependency: crc32 of the standard library is there, and slower
    xxh3_64 = None

# Small enough that a piece which was just copied is still in the core's own cache.
PIECE_BYTES = 256 << 10


def _crc32(pieces: Iterable[Any]) -> int:
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value


def _xxh3_64(pieces: Iterable[Any]) -> int:
    digest = xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return int(digest.intdigest())


# Of pieces of memory, as if they were one.
CHECKSUMS: dict[str, Callable[[Iterable[Any]], int]] = {"crc32": _crc32}
if xxh3_64 is not None:
    CHECKSUMS["xxh3_64"] = _xxh3_64
FASTEST = "xxh3_64" if "xxh3_64" in CHECKSUMS else "crc32"


def block_checksums(name: str, data: torch.Tensor, block_ids: Sequence[int]) -> tuple[int, ...]:
    """Of each block of ``data``, uint8 [num_blocks, block_bytes]. Blocks of a GPU are copied to the
    host for it. Raises InputError for a checksum that is not known here.
    """
    of = _known(name)
    return tuple(of((data[block].cpu().numpy(),)) for block in block_ids)


def copy_block(name: str, block: np.ndarray, into: np.ndarray) -> int:
    """Copy a block, uint8 [block_bytes], and return the checksum of what landed. Raises InputError
    for a checksum that is not known here.
    """
    return _known(name)(_copied(block, into))


def _copied(block: np.ndarray, into: np.ndarray) -> Iterator[np.ndarray]:
    """The pieces of ``into``, each when it has landed."""
    for start in range(0, len(into), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        np.copyto(into[piece], block[piece])
        yield into[piece]


def _known(name: str) -> Callable[[Iterable[Any]], int]:
    if name not in CHECKSUMS:
        raise InputError(f"No checksum {name!r}; there are {', '.join(CHECKSUMS)}.")
    return CHECKSUMS[name]
