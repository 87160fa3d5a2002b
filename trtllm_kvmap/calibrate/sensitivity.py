"""How much the target's next words depend on each key and value it holds.

With p the target's prediction of a continuation and g the gradient of log p(y) with respect to one
cached key or value, y drawn from p itself, E[g g^T] is the Fisher information: to second order, an
error e of that key or value costs KL = e^T E[g g^T] e / 2. Attention, queries and output projection
are all in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from trtllm_kvmap.calibrate.capture import CapturedKv, HeldCache
from trtllm_kvmap.calibrate.continuation import log_p_after
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import remove_rope


def gradients(
    loaded: LoadedModel, cache: HeldCache, continuations: Sequence[Sequence[int]]
) -> list[CapturedKv]:
    """One set of gradients for each continuation, read on top of ``cache``, which capture.read
    filled with a document of num_tokens; it is not changed.

    As pre-RoPE keys and values, float32 [num_layers, num_kv_heads, num_tokens, head_dim], but for
    the square of the attention factor, which is one constant for all. Equal input draws equal y.
    """
    layers: Any = cache.layers
    leaves = [x.detach().requires_grad_() for layer in layers for x in (layer.keys, layer.values)]
    held = leaves[0].shape[2]
    positions = torch.arange(held, device=loaded.device)
    rope, length = loaded.spec.rope, loaded.rope_length(held)
    found = []
    for continuation in continuations:
        with torch.enable_grad():
            loss = _drawn_loss(loaded, leaves, continuation)
        keys, values = (
            torch.stack([x[0] for x in each]).float()
            for each in _by_field(torch.autograd.grad(loss, leaves))
        )
        found.append(CapturedKv(remove_rope(keys, positions, rope, length), values))
    return found


def _drawn_loss(
    loaded: LoadedModel, leaves: list[torch.Tensor], continuation: Sequence[int]
) -> torch.Tensor:
    """-log p(y) summed over the continuation, the next token y drawn from p at every step."""
    log_p, held = log_p_after(loaded, *_by_field(leaves), continuation), leaves[0].shape[2]
    generator = torch.Generator().manual_seed(zlib.crc32(repr((held, continuation)).encode()))
    drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator)
    loss: torch.Tensor = -log_p.gather(1, drawn.to(log_p.device)).sum()
    return loss


def _by_field(
    each: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    return each[0::2], each[1::2]
