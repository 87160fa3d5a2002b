"""How the error of mapped keys and values depends on the token: its position, and its kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.evaluate.diagnosis.diagnosis import TokenError
from trtllm_kvmap.evaluate.diagnosis.token_kinds import buckets_of, kinds_of
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import remove_rope
from trtllm_kvmap.spec.slices import FIELDS


class TokenErrors:
    """Adds up over contexts: for each token |y' - y|^2 over the mean of |y - mean y|^2 of the
    context's mapped tokens, in each layer, and of that the mean over layers.
    """

    def __init__(self, target: LoadedModel) -> None:
        self._target = target
        self._sums: dict[tuple[str, str], list[float]] = {}  # key error, value error, tokens

    def add(
        self,
        mapped: KvPool,
        native: KvPool,
        tokens: range,
        rope_length: int,
        context: Sequence[int],
    ) -> None:
        """Compare the entries ``tokens`` of two dense pools of one block, written at positions
        equal to their entries in passes of ``rope_length`` tokens.
        """
        errors = [self._errors(mapped, native, tokens, rope_length, f) for f in range(len(FIELDS))]
        groups = {"position": buckets_of(tokens), "kind": kinds_of(self._target.tokenizer, context)}
        for group, named in groups.items():
            for name, positions in named.items():
                inside = [p - tokens.start for p in positions if p in tokens]
                if inside:
                    sums = self._sums.setdefault((group, name), [0.0, 0.0, 0.0])
                    for index, error in enumerate(errors):
                        sums[index] += float(error[inside].sum())
                    sums[2] += len(inside)

    def rows(self) -> list[TokenError]:
        """By position in order, then by kind in order of their names."""

        def place(name: tuple[str, str]) -> tuple[bool, int, str]:
            group, called = name
            by_position = group == "position"
            return not by_position, int(called.split("-")[0]) if by_position else 0, called

        return [
            TokenError(*name, int(count), key / count, value / count)
            for name, (key, value, count) in sorted(
                self._sums.items(), key=lambda entry: place(entry[0])
            )
        ]

    def _errors(
        self, mapped: KvPool, native: KvPool, tokens: range, rope_length: int, field: int
    ) -> torch.Tensor:
        """float64 [tokens], mean over layers."""
        positions = torch.arange(tokens.start, tokens.stop, device=native.device)
        rope, total = self._target.spec.rope, torch.zeros(len(tokens), dtype=torch.float64)
        views = list(
            zip(mapped.field(FIELDS[field])[0], native.field(FIELDS[field])[0], strict=True)
        )
        for pair in views:
            ours, theirs = (view[0, :, tokens.start : tokens.stop].double() for view in pair)
            if FIELDS[field] == "key":
                ours, theirs = (
                    remove_rope(x, positions, rope, rope_length) for x in (ours, theirs)
                )
            spread = (theirs - theirs.mean(dim=1, keepdim=True)).square().sum() / len(tokens)
            total += ((ours - theirs).square().sum(dim=(0, 2)) / spread.clamp_min(1e-30)).cpu()
        return total / len(views)
