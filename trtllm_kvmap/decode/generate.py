"""Decoding that starts from a cache and the logits of its last token, greedy or sampled.

transformers' own generate() starts from token ids and computes the last one again; a handed-over
cache comes with those logits, and its positions need not be its entries, so the loop is written
out here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.prompt import require_room
from trtllm_kvmap.decode.sampling import choose, require_temperature
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache, num_entries
from trtllm_kvmap.models import LoadedModel


def generate(
    loaded: LoadedModel,
    cache: HfCache,
    logits: torch.Tensor,
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    position: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[int]:
    """At most ``max_new_tokens`` tokens, ending with the first of ``eos_token_ids``: the best ones,
    or at a ``temperature`` above 0 drawn with ``generator``.

    ``logits`` [vocab_size] are those after the last token in ``cache``; ``position`` is where the
    first new token goes (None: after the last entry). ``cache`` is extended in place by all new
    tokens but the last, which has not been read. Raises InputError when the sequence would outgrow
    the model.
    """
    where = None if position is None else torch.tensor([position])
    rows = generate_batch(
        loaded,
        cache,
        logits.reshape(1, -1),
        max_new_tokens,
        eos_token_ids=eos_token_ids,
        positions=where,
        temperature=temperature,
        generator=generator,
    )
    return rows[0]


def generate_batch(
    loaded: LoadedModel,
    cache: HfCache,
    logits: torch.Tensor,
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    positions: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """generate() for every row: ``logits`` [batch, vocab_size], ``positions`` int64 [batch].

    ``attention_mask`` [batch, entries] marks left pads of the cache with 0 and sets the positions
    where none are given. Each row continues as it would alone and ends at its own end token.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    require_temperature(temperature)
    batch, entries, device = logits.shape[0], num_entries(cache), loaded.device
    mask = torch.ones(batch, entries, dtype=torch.long, device=device)
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask, device=device).long()
    where = mask.sum(-1) if positions is None else positions.to(device)
    require_room(loaded, int(where.max()) + max_new_tokens)
    rows: list[list[int]] = [[] for _ in range(batch)]
    running = set(range(batch))
    while True:
        chosen = choose(logits, temperature, generator).to(device)
        for row, token in enumerate(chosen.tolist()):
            if row in running:
                rows[row].append(token)
                if token in eos_token_ids or len(rows[row]) == max_new_tokens:
                    running.discard(row)
        if not running:
            return rows
        mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=-1)
        step = prefill(
            loaded, chosen[:, None], cache, positions=where[:, None], attention_mask=mask
        )
        logits, where = step.logits[:, -1], where + 1


def stream_tokens(
    loaded: LoadedModel,
    cache: HfCache,
    logits: torch.Tensor,
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
) -> Iterator[int]:
    """The tokens of generate(), each as soon as it is known; whoever stops asking stops the model.

    Raises InputError as generate() does, when the first token is asked for.
    """
    require_room(loaded, num_entries(cache) + max_new_tokens)
    for left in reversed(range(max_new_tokens)):
        token = int(logits.argmax())
        yield token
        if token in eos_token_ids or not left:
            return
        logits = prefill(loaded, [token], cache, logits_to_keep=1).logits[-1]


class NearTie(NamedTuple):
    """At ``step`` the best two tokens were closer than the margin: either may win on another
    machine.
    """

    step: int
    token_ids: tuple[int, int]
    distance: float


def near_ties(logits: torch.Tensor, margin: float) -> list[NearTie]:
    """The rows of ``logits`` [num_steps, vocab_size] whose best two lie closer than ``margin``.

    Two ways of computing the same thing differ by rounding. A test that compares two greedy token
    streams gives the logits of one of them, and names the tie when the streams part there.
    """
    best = logits.float().topk(2, dim=-1)
    distances = best.values[:, 0] - best.values[:, 1]
    return [
        NearTie(step, tuple(best.indices[step].tolist()), float(distances[step]))
        for step in torch.nonzero(distances < margin).flatten().tolist()
    ]
