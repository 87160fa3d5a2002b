"""A draft writes a block of proposals for every row of a batch, each as long as the row allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trtllm_kvmap.decode.sampling import distribution, draw
from trtllm_kvmap.decode.speculation.ragged import RaggedRows


@dataclass(slots=True)
class Block:
    """The proposals of one row, and the distributions they were drawn from, [vocab_size] each
    (empty when greedy).
    """

    tokens: list[int] = field(default_factory=list)
    drawn_from: list[torch.Tensor] = field(default_factory=list)


def propose(
    draft: RaggedRows,
    unread: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    vocab_size: int,
    temperature: float,
    generator: torch.Generator | None,
    confidence: float,
) -> list[Block]:
    """At most ``limits`` tokens for each row, after ``unread``, which the draft reads first.

    Only ids below ``vocab_size``, the verifier's, are proposed. The last proposal of a row is not
    read. A row of limit 0 reads nothing. See DraftLength for ``confidence``.
    """
    blocks = [Block() for _ in limits]
    chances = [1.0] * len(blocks)
    feed = [list(row) if limit else [] for row, limit in zip(unread, limits, strict=True)]
    while any(feed):
        last = torch.tensor([max(len(row) - 1, 0) for row in feed])
        logits = draft.read(feed)[torch.arange(len(feed)), last, :vocab_size]
        # A greedy draft is as sure as its own distribution says, at temperature 1.
        probabilities = distribution(logits, temperature or 1.0)
        if temperature:
            tokens = draw(probabilities, generator).tolist()
        else:
            best = probabilities.max(-1)
            tokens = best.indices.tolist()
            chances = [c * p for c, p in zip(chances, best.values.tolist(), strict=True)]
        for row, block in enumerate(blocks):
            if not feed[row]:
                continue
            feed[row] = []
            if chances[row] >= confidence:
                block.tokens.append(tokens[row])
                if temperature:
                    block.drawn_from.append(probabilities[row])
                if len(block.tokens) < limits[row]:
                    feed[row] = [tokens[row]]
    return blocks
