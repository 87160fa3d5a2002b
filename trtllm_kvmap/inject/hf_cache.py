"""transformers' caches as pools of blocks: one block per sequence, as long as the cache.

A cache of ``batch`` sequences and ``entries`` tokens is a pool of ``batch`` blocks with
``tokens_per_block = entries``, so entry e of sequence b is slot ``b * entries + e``. The pool's
views are the cache's own tensors: what map_kv writes there, the model reads.

Only the plain cache (DynamicCache with full attention in every layer) is one tensor of every token;
sliding-window, static, quantised and hybrid caches are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams, written_length

HfCache = DynamicCache


class Pass(NamedTuple):
    """Entries first .. last - 1 were written with the RoPE frequencies of ``rope_length``."""

    first: int
    last: int
    rope_length: int


def empty_cache() -> HfCache:
    """A cache that holds no token yet."""
    return DynamicCache()


def make_cache(
    spec: ModelSpec,
    entries: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> HfCache:
    """A cache of ``batch`` sequences with room for ``entries`` tokens, to be written through
    view_pool.

    It is zero, not whatever the memory held: attention multiplies masked entries too, and 0 * NaN
    is NaN.
    """
    shape = (batch, spec.num_kv_heads, entries, spec.head_dim)
    cache = DynamicCache()
    for _ in range(spec.num_layers):
        keys = torch.zeros(shape, dtype=dtype, device=device)
        cache.layers.append(_layer(keys, torch.zeros_like(keys)))
    return cache


def num_entries(cache: HfCache) -> int:
    """How many tokens the cache holds for each sequence, pads included."""
    return int(cache.get_seq_length())


def view_pool(cache: HfCache) -> KvPool:
    """The cache as a pool, without a copy: views [batch, num_kv_heads, entries, head_dim].

    A later forward pass moves the cache to new tensors, so take the view anew after one. Raises
    MismatchError for a cache that does not keep every token of every layer in one tensor, and
    InputError for an empty one.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise MismatchError(
            f"A cache of type {type(cache).__name__} cannot be read; give the DynamicCache that a "
            f"model fills when it is called with use_cache=True."
        )
    other = next((layer for layer in layers if type(layer) is not DynamicLayer), None)
    if other is not None or getattr(cache, "offloading", False):
        kind = "offloaded layers" if other is None else f"layers of type {type(other).__name__}"
        raise MismatchError(
            f"The cache has {kind}, which do not keep every token in one tensor (sliding-window, "
            f"static, quantised, offloaded and hybrid caches do not). Use a plain DynamicCache() "
            f"with a model that has full attention in every layer."
        )
    if num_entries(cache) == 0:
        raise InputError("The cache holds no token; run the model over the prompt first.")
    return KvPool(
        keys=tuple(layer.keys for layer in layers), values=tuple(layer.values for layer in layers)
    )


def fork(cache: HfCache, entries: int | None = None) -> HfCache:
    """A second cache over the first ``entries`` tokens (None: all) of the same tensors.

    Nothing is copied. Running a model on one does not change the other, because transformers grows
    a cache into new tensors; only put_span and map_kv write in place, and are seen by both.
    """
    forked = DynamicCache()
    held = num_entries(cache)
    entries = held if entries is None else entries
    if held:
        pool = view_pool(cache)
        _require_inside(range(entries), pool)
        for keys, values in zip(pool.keys, pool.values, strict=True):
            forked.layers.append(_layer(keys[:, :, :entries], values[:, :, :entries]))
    _passes(forked).extend(
        Pass(p.first, min(p.last, entries), p.rope_length)
        for p in _passes(cache)
        if p.first < entries
    )
    return forked


def keep_entries(cache: HfCache, kept: torch.Tensor) -> HfCache:
    """A second cache of the entries that ``kept`` (bool [batch, entries]) marks, in their order; a
    row that keeps fewer than another stands behind zeros.

    When every row keeps the same first entries this is a fork, and nothing is copied. Otherwise the
    entries move, and the record of written_lengths is lost.
    """
    longest = int(kept.sum(-1).max())
    if bool(kept[:, :longest].all()):
        return fork(cache, longest)
    order = kept.long().argsort(dim=-1, stable=True)[:, kept.shape[1] - longest :]
    empty = ~kept.gather(1, order)[:, None, :, None]
    compacted, pool = DynamicCache(), view_pool(cache)
    for keys, values in zip(pool.keys, pool.values, strict=True):
        chosen = order[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        moved = (part.gather(2, chosen).masked_fill_(empty, 0) for part in (keys, values))
        compacted.layers.append(_layer(*moved))
    return compacted


def take_span(cache: HfCache, span: range) -> KvPool:
    """A copy of the entries of ``span``, as a pool with one block per sequence."""
    pool = view_pool(cache)
    _require_inside(span, pool)
    return KvPool(
        keys=tuple(keys[:, :, span.start : span.stop].clone() for keys in pool.keys),
        values=tuple(values[:, :, span.start : span.stop].clone() for values in pool.values),
    )


def put_span(cache: HfCache, first: int, taken: KvPool) -> None:
    """Write ``taken`` over the entries that begin at ``first``, bit for bit, in place.

    Raises MismatchError when layers, heads, head_dim, dtype or the number of sequences differ, and
    InputError when the span does not fit; then nothing is written.
    """
    pool = view_pool(cache)
    span = range(first, first + taken.tokens_per_block)
    _require_inside(span, pool)
    batch = pool.keys[0].shape[0], taken.keys[0].shape[0]
    if pool.kv_shape != taken.kv_shape or pool.dtype != taken.dtype or batch[0] != batch[1]:
        raise MismatchError(
            f"The span holds {batch[1]} sequences of (layers, KV heads, head_dim) "
            f"{taken.kv_shape} in {taken.dtype}; the cache needs {batch[0]} of {pool.kv_shape} in "
            f"{pool.dtype}."
        )
    for here, there in zip(pool.keys + pool.values, taken.keys + taken.values, strict=True):
        here[:, :, span.start : span.stop].copy_(there)


def put_cache(cache: HfCache, taken: HfCache) -> None:
    """Write all entries of ``taken`` over the first ones of ``cache``, with the record of how they
    were rotated. Raises as put_span; an empty ``taken`` writes nothing.
    """
    if num_entries(taken):
        put_span(cache, 0, view_pool(taken))
        _passes(cache).extend(_passes(taken))


def join(head: HfCache, cache: HfCache) -> HfCache:
    """A new cache: all entries of ``head``, then those of ``cache`` beyond. Neither changes."""
    entries, end = num_entries(head), num_entries(cache)
    if entries >= end:
        return fork(head)
    joined, here, there = DynamicCache(), view_pool(head), view_pool(cache)
    for layer in range(len(there.keys)):
        keys, values = (
            torch.cat([mine[layer], other[layer][:, :, entries:]], dim=2)
            for mine, other in ((here.keys, there.keys), (here.values, there.values))
        )
        joined.layers.append(_layer(keys, values))
    _passes(joined).extend(_passes(head))
    _passes(joined).extend(
        Pass(max(p.first, entries), p.last, p.rope_length)
        for p in _passes(cache)
        if p.last > entries
    )
    return joined


def overwrite_with_last(cache: HfCache, entries: Sequence[int]) -> None:
    """Move the last ``len(entries)`` entries over ``entries``, in order, and drop them from the
    end.
    """
    pool, columns = view_pool(cache), list(entries)
    for view in pool.keys + pool.values:
        view[:, :, columns] = view[:, :, view.shape[2] - len(columns) :].clone()
    cache.crop(-len(columns))


def record_pass(cache: HfCache, written: Pass) -> None:
    """Note with which RoPE frequencies entries were written; see written_lengths."""
    _passes(cache).append(written)


def rope_length_of(cache: HfCache, rope: RopeParams, count: int) -> int:
    """The sequence length whose frequencies the first ``count`` keys were written with: ``count``
    itself where none was recorded, or nothing depends on it. Raises MismatchError when they were
    written with more than one set of frequencies.
    """
    if not rope.length_dependent:
        return count
    return written_length(rope, written_lengths(cache, range(count)) or [count])


def written_lengths(cache: HfCache, span: range) -> list[int] | None:
    """The rope_lengths of the passes that wrote the entries of ``span``; None when that was not
    recorded.

    Only length-dependent RoPE kinds need this. The record travels with the cache object, also
    through copy.deepcopy.
    """
    touching = [p for p in _passes(cache) if p.first < span.stop and p.last > span.start]
    known = {entry for p in touching for entry in range(p.first, p.last)}
    return None if set(span) - known else [p.rope_length for p in touching]


def recorded_passes(cache: HfCache) -> tuple[Pass, ...]:
    """Everything record_pass has noted, to be written down with the cache."""
    return tuple(_passes(cache))


def _passes(cache: HfCache) -> list[Pass]:
    passes: list[Pass] = cache.__dict__.setdefault("kvmap_passes", [])
    return passes


def _layer(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    layer = DynamicLayer()  # type: ignore[no-untyped-call]
    # An update with no token sets up device, dtype and flags as each version of transformers does.
    layer.update(keys[:, :, :0], values[:, :, :0])
    layer.keys, layer.values = keys, values
    return layer


def _require_inside(span: range, pool: KvPool) -> None:
    if not 0 <= span.start <= span.stop <= pool.tokens_per_block or span.step != 1:
        raise InputError(
            f"Tokens {span.start} to {span.stop} lie outside a cache of {pool.tokens_per_block}."
        )
