"""Token ids as a left-padded batch, checked before any model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import KnownModel, ModelDescription

TokenIds = torch.Tensor | Sequence[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """``batch`` sequences of ``num_tokens`` columns, pads on the left.

    ``token_ids`` int64 [batch, num_tokens]; ``mask`` bool [batch, num_tokens], False for a pad;
    ``positions`` int64 [batch, num_tokens], each row counts its own tokens from 0 (a pad has 0).
    ``single`` remembers that one sequence without a batch dimension was given.
    """

    token_ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    single: bool

    @staticmethod
    def of(
        token_ids: TokenIds,
        attention_mask: torch.Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> Prompt:
        """From ids [num_tokens] or [batch, num_tokens] and a mask [batch, num_tokens] (None: no
        pads).

        Raises InputError for other shapes, no token, ids that are not integers, or a mask that is
        not left-padded.
        """
        ids = as_token_ids(token_ids, device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        if attention_mask is not None:
            mask = torch.as_tensor(attention_mask, device=device).bool()
            _check_mask(mask, ids)
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
        return Prompt(ids, mask, positions, single=torch.as_tensor(token_ids).ndim == 1)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[1])

    @property
    def batch(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def padded(self) -> bool:
        return not bool(self.mask.all())

    @property
    def pads(self) -> list[int]:
        """How many columns of each row are pads."""
        return [int(row) for row in (~self.mask).sum(-1)]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row."""
        return int(self.mask.sum(-1).max())


def as_token_ids(token_ids: TokenIds, device: torch.device | None = None) -> torch.Tensor:
    """int64 [batch, num_tokens] from ids [num_tokens] or [batch, num_tokens]."""
    ids = torch.as_tensor(token_ids, device=device)
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise InputError(
            f"Token ids need the shape [num_tokens] or [batch, num_tokens] with at least one "
            f"token, got {list(ids.shape)}."
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(f"Token ids must be integers, got {ids.dtype}.")
    return ids.long().reshape(-1, ids.shape[-1])


def require_tokens(loaded: KnownModel, token_ids: torch.Tensor) -> None:
    """Raise InputError for ids that ``loaded`` has no embedding for."""
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= loaded.spec.vocab_size:
        raise InputError(
            f"Token ids reach from {low} to {high}; {loaded.name} knows 0 to "
            f"{loaded.spec.vocab_size - 1}. Tokenise the text with this model's tokenizer."
        )


def require_room(model: KnownModel | ModelDescription, num_tokens: int) -> None:
    """Raise InputError when ``model`` cannot read a sequence of ``num_tokens``."""
    if num_tokens > model.spec.max_positions:
        raise InputError(
            f"The sequence takes {num_tokens} positions; {model.name} allows "
            f"{model.spec.max_positions}. Shorten the prompt or ask for fewer new tokens."
        )


def _check_mask(mask: torch.Tensor, ids: torch.Tensor) -> None:
    if mask.shape != ids.shape:
        raise InputError(
            f"The attention mask has the shape {list(mask.shape)}; the token ids need "
            f"{list(ids.shape)}."
        )
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1].all()):
        raise InputError(
            "The attention mask must be left-padded: zeros, then ones up to the last column of "
            "every row. Use a tokenizer with padding_side='left'."
        )
