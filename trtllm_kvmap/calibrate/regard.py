"""What the target makes of a document's keys and values when it reads on: which tokens it depends
on, and which directions of an error it notices.

A query q scores the key k as q . k, so an error e of that key costs (q . e)^2, and over all queries
e^T (sum q q^T) e. Queries meet a key at every distance, and RoPE turns one against the other; a map
works on keys without rotation, so the sum is turned back by the key's position and averaged over
positions. An error of a value goes through the output projection of its query heads into the
residual stream: e^T (sum W^T W) e.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_kvmap.calibrate.capture import (
    Attention,
    HeldCache,
    attention_given,
    output_projection,
)
from trtllm_kvmap.calibrate.config import Weighting
from trtllm_kvmap.calibrate.continuation import read_after
from trtllm_kvmap.calibrate.sensitivity import gradients
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import applying_rows
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.spec.slices import FIELDS, Field

# Queries of a head whose shares of attention are computed at a time: bounds the float32 workspace
# at a few times num_heads x this x entries.
QUERIES = 256


@dataclass(frozen=True, slots=True)
class Regard:
    """Of each field, ``rows`` [num_layers, num_kv_heads, num_tokens], float32: how much depends on
    each key or value; and ``cost`` [num_layers, num_kv_heads, head_dim, head_dim], float64:
    e^T M e is what an error e of one costs, summed over the queries that were read.
    """

    rows: dict[Field, torch.Tensor]
    cost: dict[Field, torch.Tensor]


def regard(
    loaded: LoadedModel,
    cache: HeldCache,
    continuations: Sequence[Sequence[int]],
    weighting: Weighting,
    projected: torch.Tensor,
) -> Regard:
    """What reading each of ``continuations`` on top of ``cache`` tells, added up; ``cache`` holds a
    document (capture.read) and is not changed. ``projected`` is what projections() gives. Equal
    input gives equal numbers.
    """
    layers, heads, head_dim = loaded.spec.kv_shape
    entries: Any = cache.layers
    keys, values = [layer.keys for layer in entries], [layer.values for layer in entries]
    held = keys[0].shape[2]
    rows: dict[Field, torch.Tensor] = {f: torch.zeros(layers, heads, held) for f in FIELDS}
    products = torch.zeros(layers, heads, head_dim, head_dim, dtype=torch.float64)
    for continuation in continuations:  # one at a time: each holds a copy of the cache
        with attention_given(loaded) as given:
            if weighting == "sensitivity":
                (slope,) = gradients(loaded, cache, [continuation])
                moved = slope.keys.square().sum(-1), slope.values.square().sum(-1)
            else:
                read_after(loaded, keys, values, continuation)
                moved = _moved_outputs(given, held)
        for field, squares in zip(FIELDS, moved, strict=True):
            rows[field] += squares.cpu()
        products += torch.stack([attention.products() for attention in given]).cpu()
    positions, rope = torch.arange(held), loaded.spec.rope
    turns = applying_rows(positions, rope, loaded.rope_length(held), torch.float64)
    return Regard(
        rows=rows,
        cost={
            "key": turned_back(products, *turns, rope),
            "value": projected * sum(map(len, continuations)),
        },
    )


def projections(loaded: LoadedModel) -> torch.Tensor:
    """sum W^T W of the query heads that read each KV head, W their part of the output projection,
    float64 [num_layers, num_kv_heads, head_dim, head_dim].

    Raises UnavailableError for a model whose output projection is not found.
    """
    layers, heads, head_dim = loaded.spec.kv_shape
    found = []
    for layer in range(layers):
        weight = output_projection(loaded, layer).double().cpu()
        by_head = weight.view(len(weight), heads, -1, head_dim)
        found.append(torch.einsum("ohgd,ohge->hde", by_head, by_head))
    return torch.stack(found)


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


def _moved_outputs(given: Sequence[Attention], held: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys and of values, [num_layers, num_kv_heads, held]. With a the share of a query's
    attention that an entry gets, v its value and o what the query reads, an error of v moves o by a
    times it, and one of the entry's score by a (v - o) times it: their squares, summed over
    queries.
    """
    of_keys, of_values = [], []
    for attention in given:
        sums = attention.keys.new_zeros(2, len(attention.keys), held, dtype=torch.float32)
        for piece in attention.pieces(QUERIES):
            a, v = piece.shares(), piece.values.float()
            o = a @ v
            apart = o.square().sum(-1, keepdim=True) - 2 * o @ v.mT + v.square().sum(-1)[:, None]
            squares = a.square()[..., :held]  # [num_kv_heads, queries, held]
            sums[0] += (squares * apart[..., :held].clamp_min(0)).sum(1)
            sums[1] += squares.sum(1)
        of_keys.append(sums[0])
        of_values.append(sums[1])
    return torch.stack(of_keys), torch.stack(of_values)


def turned_back(
    products: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: RopeParams
) -> torch.Tensor:
    """sum q q^T [..., head_dim, head_dim] of rotated queries becomes that of queries turned back by
    a position, mean over the positions of ``cos`` and ``sin`` [positions, rotary_dim / 2].
    """
    # Turned back, a channel is c times itself plus s times its partner's.
    channels = torch.arange(products.shape[-1])
    pairs = channels[: rope.rotary_dim]
    first, second = (pairs[0::2], pairs[1::2]) if rope.interleaved else pairs.chunk(2)
    partner = channels.clone()
    partner[first], partner[second] = second, first
    c, s = cos.new_ones(len(cos), len(channels)), cos.new_zeros(len(cos), len(channels))
    c[:, first] = c[:, second] = cos
    s[:, first], s[:, second] = sin, -sin
    crossed = c.T @ s * products[..., partner]
    turned = c.T @ c * products + crossed + crossed.mT
    turned += s.T @ s * products[..., partner, :][..., partner]
    return turned / len(cos)
