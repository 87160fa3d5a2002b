"""Reading and writing the rows of a paged pool: by runs of adjacent slots where there are long
ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

# Below this many tokens per run, one gather by index beats a copy per run.
SHORTEST_MEAN_RUN = 32


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of one span lie in a pool.

    ``runs`` holds (first token, block, first offset, tokens) of slots that follow each other inside
    a block; it is empty when they are too short to be worth a copy each. Then ``blocks`` and
    ``offsets``, int64 [num_tokens] on the pool's device, say it token by token.
    """

    runs: tuple[tuple[int, int, int, int], ...]
    blocks: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def of(slots: torch.Tensor, tokens_per_block: int, device: torch.device) -> Places:
        """``slots`` is int64 [num_tokens] on the CPU, without skips, at least one."""
        blocks, offsets = slots // tokens_per_block, slots % tokens_per_block
        broken = (blocks.diff() != 0) | (offsets.diff() != 1)
        starts = [0, *(broken.nonzero()[:, 0] + 1).tolist(), len(slots)]
        short = len(slots) < SHORTEST_MEAN_RUN * (len(starts) - 1)
        # On a GPU every copy is a launch, and one gather costs one.
        if len(starts) > 2 and (short or device.type != "cpu"):
            return Places((), blocks.to(device), offsets.to(device))
        runs = tuple(
            (first, int(blocks[first]), int(offsets[first]), stop - first)
            for first, stop in pairwise(starts)
        )
        return Places(runs, blocks, offsets)

    def read(self, view: torch.Tensor, rows: torch.Tensor) -> None:
        """rows [num_tokens, heads, head_dim] <- view [num_blocks, heads, tokens_per_block,
        head_dim], converted to the dtype of ``rows``.
        """
        if not self.runs:
            rows.copy_(view[self.blocks, :, self.offsets])
        for first, block, offset, count in self.runs:
            part = view[block, :, offset : offset + count]
            rows[first : first + count].copy_(part.transpose(0, 1))

    def write(self, view: torch.Tensor, rows: torch.Tensor) -> None:
        """view <- rows, rounded to the dtype of ``view``; shapes as in ``read``."""
        if not self.runs:
            view[self.blocks, :, self.offsets] = rows.to(view.dtype)
        for first, block, offset, count in self.runs:
            part = rows[first : first + count].transpose(0, 1)
            view[block, :, offset : offset + count].copy_(part)
