"""How much the target's next words depend on each key and value it holds.

With p the target's prediction of a continuation and g the gradient of log p(y) with respect to one
cached key or value, y drawn from p itself, E[g g^T] is the Fisher information: to second order, an
error e of that key or value costs KL = e^T E[g g^T] e / 2. Attention, queries and output projection
are all in it, and no architecture needs to be known.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from trtllm_kvmap.calibrate.capture import CapturedKv, cache_of, read
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import remove_rope


def gradients(
    loaded: LoadedModel, token_ids: torch.Tensor, continuations: Sequence[Sequence[int]]
) -> list[CapturedKv]:
    """One set of gradients for each continuation, read after ``token_ids`` (int64 [num_tokens]).

    As pre-RoPE keys and values, float32 [num_layers, num_kv_heads, num_tokens, head_dim], but for
    the square of the attention factor, which is one constant for all. Equal input draws equal y.
    """
    layers: Any = read(loaded, token_ids).layers
    leaves = [x.detach().requires_grad_() for layer in layers for x in (layer.keys, layer.values)]
    positions = torch.arange(len(token_ids), device=loaded.device)
    rope, length = loaded.spec.rope, loaded.rope_length(len(token_ids))
    found = []
    for continuation in continuations:
        with torch.enable_grad():
            loss = _drawn_loss(loaded, leaves, len(token_ids), continuation)
        keys, values = (
            torch.stack([x[0] for x in each]).float()
            for each in _by_field(torch.autograd.grad(loss, leaves))
        )
        found.append(CapturedKv(remove_rope(keys, positions, rope, length), values))
    return found


def row_weights(squares: torch.Tensor, ess_floor: float) -> torch.Tensor:
    """float32 [num_tokens], mean 1: ``squares`` [num_tokens] mixed with equal weights, as little as
    leaves an effective sample size (sum w)^2 / sum w^2 of at least ``ess_floor`` tokens in one.

    Documents on which nothing depends weigh their tokens alike.
    """
    if not float(squares.sum()) > 0:
        return torch.ones_like(squares)
    weights = squares / squares.mean()
    # (1 - m)^2 variance <= 1 / floor - 1 for a share m of equal weights.
    spread = float(weights.var(correction=0)) / (1 / ess_floor - 1 + 1e-12)
    mixed = max(0.0, 1 - spread**-0.5) if spread > 0 else 0.0
    return mixed + (1 - mixed) * weights


def _drawn_loss(
    loaded: LoadedModel, leaves: list[torch.Tensor], held: int, continuation: Sequence[int]
) -> torch.Tensor:
    """-log p(y) summed over the continuation, the next token y drawn from p at every step."""
    keys, values = _by_field(leaves)
    ids = torch.tensor([list(continuation)], device=loaded.device)
    logits = loaded.model(
        input_ids=ids,
        position_ids=torch.arange(held, held + ids.shape[1], device=loaded.device)[None],
        use_cache=True,
        **{loaded.cache_argument: cache_of(keys, values)},
    ).logits[0]
    log_p: torch.Tensor = logits.float().log_softmax(-1)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((held, continuation)).encode()))
    drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator)
    loss: torch.Tensor = -log_p.gather(1, drawn.to(log_p.device)).sum()
    return loss


def _by_field(
    each: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    return each[0::2], each[1::2]
