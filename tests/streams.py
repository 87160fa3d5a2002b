"""Greedy token streams of two computations that differ by rounding alone."""

from __future__ import annotations

import torch

from trtllm_kvmap.decode.generate import near_ties


def require_equal_streams(
    mine: list[int], theirs: list[int], logits: torch.Tensor, margin: float = 1e-4
) -> None:
    """Fail unless the streams are equal, or part at a near-tie, which is printed.

    ``logits`` [len(theirs), vocab_size] are those from which ``theirs`` was chosen.
    """
    assert len(mine) == len(theirs) == len(logits)
    parted = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
    if parted is not None:
        ties = {tie.step: tie for tie in near_ties(logits, margin)}
        assert parted in ties, f"the streams part at step {parted}, which is no near-tie"
        print(f"the streams part at a near-tie: {ties[parted]}")
