"""How far a mapped cache is from the target's own: NRMSE and cosine by layer, keys un-rotated."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_kvmap.evaluate.metrics import cosine
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.rotary import remove_rope
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.spec.slices import FIELDS


class KvError:
    """Adds up over items. ``nrmse`` is sqrt(sum |y' - y|^2 / sum |y - mean y|^2) over the tokens,
    heads and channels of a layer, so that 1 - nrmse^2 is the held-out R2; ``cosine`` is the mean
    over tokens and heads.
    """

    def __init__(self, num_layers: int, rope: RopeParams) -> None:
        self._rope = rope
        self._layers = {field: [_LayerError() for _ in range(num_layers)] for field in FIELDS}

    def add(self, mapped: KvPool, native: KvPool, tokens: range, rope_length: int) -> None:
        """Compare the entries ``tokens`` of two dense pools of one block, written at positions
        equal to their entries in passes of ``rope_length`` tokens.
        """
        positions = torch.arange(tokens.start, tokens.stop, device=native.device)
        for field in FIELDS:
            views = zip(mapped.field(field)[0], native.field(field)[0], strict=True)
            for layer, pair in zip(self._layers[field], views, strict=True):
                ours, theirs = (view[0, :, tokens.start : tokens.stop].double() for view in pair)
                if field == "key":
                    ours, theirs = (
                        remove_rope(keys, positions, self._rope, rope_length)
                        for keys in (ours, theirs)
                    )
                layer.add(ours, theirs)

    def to_json(self) -> dict[str, Any]:
        """{"key" and "value": {"nrmse": [layers], "cosine": [layers]}}; None without a token."""
        return {
            field: {
                "nrmse": [layer.nrmse() for layer in layers],
                "cosine": [layer.cosine() for layer in layers],
            }
            for field, layers in self._layers.items()
        }


class _LayerError:
    def __init__(self) -> None:
        self.error = self.square = self.similarity = 0.0
        self.total: torch.Tensor | float = 0.0
        self.tokens = self.heads = 0

    def add(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Both float64 [heads, tokens, head_dim]."""
        self.error += float((ours - theirs).square().sum())
        self.square += float(theirs.square().sum())
        self.total = self.total + theirs.sum(dim=1)
        self.similarity += float(cosine(ours, theirs).sum())
        self.heads, self.tokens = theirs.shape[0], self.tokens + theirs.shape[1]

    def nrmse(self) -> float | None:
        if not self.tokens:
            return None
        variance = self.square - float(torch.as_tensor(self.total).square().sum()) / self.tokens
        return (self.error / variance) ** 0.5 if variance > 0 else None

    def cosine(self) -> float | None:
        return self.similarity / (self.tokens * self.heads) if self.tokens else None
