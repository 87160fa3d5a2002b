"""All that is asked after one context, as one tree of tokens that a model reads in one pass.

Every question, choice and continuation is a path from the end of the context. Paths that begin
alike share their nodes, and a mask lets each node see the context and its own ancestors only, so
one pass gives what many separate ones would.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CONTEXT = -1  # the parent of a path's first token: the last token of the context


class TokenTree:
    """Nodes in the order they were added; a parent always comes before its children."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []  # 0 for a token right after the context
        self._node: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Add one path; returns for each of its tokens the node whose logits predict it.

        The last token of a path is predicted but never read, so it needs no node of its own.
        """
        predictors = []
        node = CONTEXT
        for index, token in enumerate(token_ids):
            predictors.append(node)
            if index + 1 < len(token_ids):
                node = self._child(node, int(token))
        return predictors

    def visible(self) -> np.ndarray:
        """bool [nodes, nodes]: row i marks node i and its ancestors."""
        seen = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != CONTEXT:
                seen[node] |= seen[parent]
        return seen

    def _child(self, parent: int, token: int) -> int:
        known = self._node.get((parent, token))
        if known is not None:
            return known
        node = len(self)
        self.token_ids.append(token)
        self.parents.append(parent)
        self.depths.append(0 if parent == CONTEXT else self.depths[parent] + 1)
        self._node[parent, token] = node
        return node
