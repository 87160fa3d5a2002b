"""The first tokens of a prompt, which carry the attention sink: the target's own, never mapped."""

from __future__ import annotations

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.prompt import Prompt
from trtllm_kvmap.inject.hf_cache import HfCache, Pass, make_cache, put_span, record_pass
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan


def add_first(
    kvmap: KvMap, target: LoadedModel, prompt: Prompt, plan: HandoffPlan, cache: HfCache
) -> tuple[HfCache, int]:
    """``cache``, which holds ``plan.spliced``, with the tokens of ``plan.first`` behind it, without
    pads: entry i is token i of its row. Also returns how many came from the map's sink table.

    A row that is shorter than that gets entries of repeated tokens behind its own; the caller drops
    them.
    """
    columns = torch.arange(plan.first.stop) + torch.tensor(prompt.pads)[:, None]
    columns = columns.clamp_max(prompt.num_tokens - 1).to(prompt.token_ids.device)
    ids = prompt.token_ids.gather(1, columns)
    done = plan.first.start
    if done == 0:
        found = _from_table(kvmap, target, ids, prompt.longest)
        if found is not None:
            cache, done = found
    if done < plan.first.stop:
        cache = prefill(
            target,
            ids[:, done:],
            cache,
            logits_to_keep=1,
            sequence_length=prompt.longest,
        ).cache
    return cache, done - plan.first.start


def _from_table(
    kvmap: KvMap, target: LoadedModel, ids: torch.Tensor, sequence_length: int
) -> tuple[HfCache, int] | None:
    """A cache of as many first tokens as the sink table holds for every row, and their number."""
    entries = [kvmap.sink_for(row) for row in ids.tolist()]
    known = [entry for entry in entries if entry is not None]
    if not known or len(known) < len(entries):
        return None
    count = min(len(entry.token_ids) for entry in known)
    rope, length = target.spec.rope, target.rope_length(sequence_length)
    if rope.regime(length) != rope.regime(count):
        count = 1  # the table was rotated for a short sequence; position 0 is never turned
    cache = make_cache(
        target.spec, count, batch=len(known), dtype=target.model.dtype, device=target.device
    )
    keys, values = (
        torch.stack([getattr(entry, field)[:, :, :count] for entry in known], dim=1)
        .to(target.device, target.model.dtype)
        .unbind(0)
        for field in ("keys", "values")
    )
    put_span(cache, 0, KvPool(keys, values))
    record_pass(cache, Pass(0, count, length))
    return cache, count
