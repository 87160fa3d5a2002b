"""Sequences of one batch that grow by unequal numbers of tokens.

A forward pass appends as many entries to every row as to the longest. Entries that a row has no
token for are masked at once, and settle() takes them, and whatever else a row gives back, out of
the cache again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.inject.hf_cache import HfCache, fork, keep_entries
from trtllm_kvmap.models import LoadedModel


class RaggedRows:
    """``loaded`` reading a batch whose rows differ in length; ``lengths`` says how long they are.

    ``cache`` [batch] begins as the given one, which is not changed; ``mask`` bool [batch, entries]
    is False for an entry that stands for no token: at first the left pads.
    """

    def __init__(self, loaded: LoadedModel, cache: HfCache, mask: torch.Tensor) -> None:
        self.loaded, self.cache, self.mask = loaded, fork(cache), mask
        self.lengths: list[int] = mask.sum(-1).tolist()

    def read(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append ``rows``, of any lengths and at least one not empty. The logits, float32 [batch,
        width, vocab_size]; those beyond a row's own tokens mean nothing.
        """
        counts = torch.tensor([len(row) for row in rows])
        width = int(counts.max())
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        columns = torch.arange(width)
        # Fillers take the position of their row's last token, so that none lies beyond the model.
        offsets = torch.minimum(columns, counts[:, None] - 1)
        positions = torch.tensor(self.lengths)[:, None] + offsets
        held = (columns < counts[:, None]).to(self.mask.device)
        self.mask = torch.cat([self.mask, held], dim=-1)
        step = prefill(self.loaded, ids, self.cache, positions=positions, attention_mask=self.mask)
        self.lengths = [held + len(row) for held, row in zip(self.lengths, rows, strict=True)]
        return step.logits

    def settle(self, lengths: Sequence[int]) -> None:
        """Cut every row back to its first ``lengths`` tokens and close the gaps: what remains is
        left-padded, and as long as its longest row.
        """
        wanted = torch.tensor(lengths, device=self.mask.device)[:, None]
        kept = self.mask & (self.mask.cumsum(-1) <= wanted)
        self.lengths = list(lengths)
        if bool(kept.all()):
            return
        self.cache = keep_entries(self.cache, kept)
        longest = max(lengths)
        self.mask = torch.arange(longest, device=wanted.device) >= longest - wanted
