"""Background exact upgrade: the answer began on mapped KV; in idle time the model reads for real.

A chunk read on top of exact entries is exact itself, so the exact part of a cache grows chunk by
chunk, over the prompt and over the tokens emitted meanwhile, until nothing mapped is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.held import Held, beyond
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import fork, join, num_entries
from trtllm_kvmap.models import LoadedModel


@dataclass(frozen=True, slots=True)
class Upgraded:
    """``held`` with one more chunk of it exact; ``logits``, float32 [len(chunk), vocab_size], are
    the model's own after each token of ``chunk``.
    """

    held: Held
    chunk: range
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Upgrade:
    """How many entries of a conversation's active model are approximate still, and the emitted
    tokens that were withdrawn because the model, reading exactly, said something else.
    """

    approximate: int
    withdrawn: tuple[int, ...] = ()


def upgrade_chunk(
    loaded: LoadedModel, held: Held, token_ids: Sequence[int], *, chunk_tokens: int = 128
) -> Upgraded:
    """Read the next ``chunk_tokens`` approximate entries of ``held`` for real.

    Promises: ``held`` stays as it is and a new one is returned, so a caller swaps at a token
    boundary and never sees half a chunk. When no approximate entry is left, the cache equals bit
    for bit one that the model filled itself with the same chunks, tokens it had emitted included,
    and ``held.logits`` are its own too.

    ``token_ids`` is the conversation, of which ``held`` holds a beginning. Raises InputError when
    there is nothing to upgrade.
    """
    if chunk_tokens < 1 or not held.approximate or len(token_ids) < held.entries:
        raise InputError(
            f"An upgrade needs chunk_tokens of at least 1, approximate entries, and the token ids "
            f"of every entry; got {chunk_tokens}, {held.approximate} of them, and "
            f"{len(token_ids)} ids for {held.entries} entries."
        )
    chunk = range(held.exact, min(held.exact + chunk_tokens, held.entries))
    read = prefill(loaded, token_ids[chunk.start : chunk.stop], fork(held.cache, chunk.start))
    whole = chunk.stop == held.entries
    upgraded = Held(
        cache=join(read.cache, held.cache),
        exact=num_entries(read.cache),
        mapped=beyond(held.mapped, chunk.stop, held.entries),
        logits=read.logits[-1] if whole else held.logits,
    )
    return Upgraded(upgraded, chunk, read.logits)


def first_disagreement(
    upgraded: Upgraded, token_ids: Sequence[int], emitted: range
) -> tuple[int, int] | None:
    """Where the model, now reading exactly, would not have emitted what it had: the first position
    in ``emitted`` whose token is not the greedy one, and the greedy one. None: it stands by them.
    """
    best = upgraded.logits.argmax(-1).tolist()
    for position in emitted:
        row = position - 1 - upgraded.chunk.start
        if 0 <= row < len(best) and best[row] != token_ids[position]:
            return position, best[row]
    return None
