"""Run a model over tokens on top of a cache: reading a prompt, repairing one, scoring text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.prompt import TokenIds, as_token_ids, require_room, require_tokens
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache, Pass, empty_cache, num_entries, record_pass
from trtllm_kvmap.models import LoadedModel


@dataclass(frozen=True, slots=True)
class Prefill:
    """The cache, now holding the tokens as well, and their logits, float32 [kept, vocab_size], or
    [batch, kept, vocab_size] when the token ids had a batch dimension. Row i predicts the token
    after token i.
    """

    cache: HfCache
    logits: torch.Tensor


@torch.no_grad()
def prefill(
    loaded: LoadedModel,
    token_ids: TokenIds,
    cache: HfCache | None = None,
    *,
    positions: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    logits_to_keep: int = 0,
    sequence_length: int = 0,
) -> Prefill:
    """Read ``token_ids`` (int [num_tokens] or [batch, num_tokens]) on top of ``cache``.

    ``cache`` (None: empty) is extended in place; give hf_cache.fork(cache) to keep the original.
    Call again with the next tokens to read in chunks.

    ``positions``: int64 [num_tokens] or [batch, num_tokens]; None continues after the cache's last
    entry. Give them when the cache holds fewer entries than positions: tokens in between that are
    in no cache do not exist for the model. ``attention_mask``: [batch, entries + num_tokens], 0 for
    a left pad in the cache or here; it also sets each row's positions. ``logits_to_keep``: only for
    so many of the last tokens (0: all). ``sequence_length``: how long the sequence is that these
    tokens begin; only length-dependent RoPE asks, and rotates as one pass over all of it would.

    Raises InputError before the model runs for token ids it does not know, positions beyond its
    limit, or shapes that do not fit.
    """
    cache = empty_cache() if cache is None else cache
    ids = as_token_ids(token_ids, loaded.device)
    require_tokens(loaded, ids)
    entries, count = num_entries(cache), ids.shape[1]
    mask = _mask(attention_mask, ids, entries)
    where = _positions(positions, mask, ids, entries)
    end = int(where.max()) + 1
    require_room(loaded, max(end, sequence_length))
    rope, ahead = loaded.spec.rope, 0
    if sequence_length > end and rope.regime(sequence_length) != rope.regime(end):
        # transformers takes a pass's frequencies from its largest position: one more token, which
        # the others cannot see, at the last position; its entry is dropped again.
        ahead, end = 1, sequence_length
        ids = torch.cat([ids, ids[:, -1:]], dim=-1)
        where = torch.cat([where, torch.full_like(where[:, -1:], end - 1)], dim=-1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(ids), 1)], dim=-1)
    keep = logits_to_keep + ahead if logits_to_keep else 0
    out = loaded.model(
        input_ids=ids,
        position_ids=where,
        attention_mask=mask,
        use_cache=True,
        logits_to_keep=keep,
        **{loaded.cache_argument: cache},
    )
    if ahead:
        cache.crop(-1)
    if rope.length_dependent:
        record_pass(cache, Pass(entries, entries + count, loaded.rope_length(end)))
    logits = out.logits[:, : out.logits.shape[1] - ahead].float()
    return Prefill(cache, logits[0] if torch.as_tensor(token_ids).ndim == 1 else logits)


def token_losses(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Nats, float64 [num_tokens - 1], of every token behind the first of ``token_ids``
    [num_tokens], as ``logits`` [num_tokens, vocab_size] after its forerunner have it.
    """
    known = token_ids[1:].to(logits.device)
    return torch.nn.functional.cross_entropy(logits[:-1].double(), known, reduction="none").cpu()


def _mask(
    attention_mask: torch.Tensor | None, ids: torch.Tensor, entries: int
) -> torch.Tensor | None:
    """int64 [batch, entries + num_tokens], or None when there is no pad: no mask is the fast
    path.
    """
    if attention_mask is None:
        return None
    mask = torch.as_tensor(attention_mask, device=ids.device).long()
    needed = (ids.shape[0], entries + ids.shape[1])
    if mask.shape != needed:
        raise InputError(
            f"The attention mask has the shape {list(mask.shape)}; {list(needed)} is needed: "
            f"{entries} entries of the cache and {ids.shape[1]} new tokens."
        )
    return None if bool(mask.all()) else mask


def _positions(
    positions: torch.Tensor | None, mask: torch.Tensor | None, ids: torch.Tensor, entries: int
) -> torch.Tensor:
    """int64 [batch, num_tokens]."""
    if positions is None:
        if mask is not None:
            return (mask.cumsum(-1) - 1).clamp_min(0)[:, entries:]
        positions = torch.arange(entries, entries + ids.shape[1])
    where = torch.as_tensor(positions, device=ids.device).long()
    if where.shape not in (ids.shape, ids.shape[1:]) or int(where.min()) < 0:
        raise InputError(
            f"positions must not be negative and need the shape {list(ids.shape[1:])} or "
            f"{list(ids.shape)}, one per token; got {list(where.shape)}."
        )
    return where.expand(ids.shape)
