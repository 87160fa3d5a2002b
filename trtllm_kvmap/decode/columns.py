"""Which column of a left-padded batch goes where: slots for the map, places for the target's own
tokens.
"""

from __future__ import annotations

import torch

from trtllm_kvmap.decode.prompt import Prompt
from trtllm_kvmap.inject.hf_cache import HfCache, num_entries, view_pool
from trtllm_kvmap.mapper.contract import Span
from trtllm_kvmap.spec.layout import SKIP
from trtllm_kvmap.spec.plan import HandoffPlan


def place_own(own: HfCache, cache: HfCache, pads: list[int]) -> None:
    """Copy the entries of ``own``, which has no pads, behind the pads of each row of ``cache``;
    what does not fit there any more is left out.
    """
    if num_entries(own) == 0:
        return
    taken, pool = view_pool(own), view_pool(cache)
    for there, here in zip(taken.keys + taken.values, pool.keys + pool.values, strict=True):
        for row, pad in enumerate(pads):
            kept = max(min(there.shape[2], here.shape[2] - pad), 0)
            here[row, :, pad : pad + kept] = there[row, :, :kept]


def mapped_span(
    prompt: Prompt,
    plan: HandoffPlan,
    *,
    source_entries: int,
    source_length: int,
    target_length: int,
) -> Span:
    """``plan.mapped`` of every row as one span between two caches, the source's of
    ``source_entries`` columns and the target's of ``plan.mapped.stop``. Pads, and the first tokens
    of a shorter row, become -1 slots.
    """
    part = slice(plan.mapped.start, plan.mapped.stop)
    columns = torch.arange(part.start, part.stop, device=prompt.token_ids.device)
    rows = torch.arange(prompt.batch, device=columns.device)[:, None]
    mapped = prompt.mask[:, part] & (prompt.positions[:, part] >= plan.first.stop)
    return Span(
        source_slots=torch.where(mapped, rows * source_entries + columns, SKIP).flatten(),
        target_slots=torch.where(mapped, rows * part.stop + columns, SKIP).flatten(),
        positions=prompt.positions[:, part].flatten(),
        token_ids=prompt.token_ids[:, part].flatten(),
        source_length=source_length,
        target_length=target_length,
    )
