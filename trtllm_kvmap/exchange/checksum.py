"""One 64-bit number per block, by which the target knows that it read what the source had.

Against torn reads, reused memory and broken links, not against a forger: the numbers travel beside
the blocks' addresses, on the same channel.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trtllm_kvmap.errors import InputError

try:
    from xxhash import xxh3_64_intdigest
except ImportError:  # not a dependency: crc32 of the standard library is there, and slower
    xxh3_64_intdigest = None

CHECKSUMS: dict[str, Callable[[Any], int]] = {"crc32": zlib.crc32}
if xxh3_64_intdigest is not None:
    CHECKSUMS["xxh3_64"] = xxh3_64_intdigest
FASTEST = "xxh3_64" if "xxh3_64" in CHECKSUMS else "crc32"


def block_checksums(name: str, data: torch.Tensor, block_ids: Sequence[int]) -> tuple[int, ...]:
    """Of each block of ``data``, uint8 [num_blocks, block_bytes]. Blocks of a GPU are copied to the
    host for it. Raises InputError for a checksum that is not known here.
    """
    if name not in CHECKSUMS:
        raise InputError(f"No checksum {name!r}; there are {', '.join(CHECKSUMS)}.")
    of = CHECKSUMS[name]
    return tuple(of(data[block].cpu().numpy()) for block in block_ids)
