"""Causal interventions: a mapped cache of which one region is the target's own.

A region of the mapped entries is replaced, the target computes the repaired window anew on top, and
is asked what the native target was asked. What the replacement changes is what the map's error in
that region does, whatever correlates with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.arms import Refused
from trtllm_kvmap.evaluate.probe import Ready
from trtllm_kvmap.evaluate.reading import Reading
from trtllm_kvmap.inject.hf_cache import (
    HfCache,
    fork,
    make_cache,
    num_entries,
    put_cache,
    view_pool,
)
from trtllm_kvmap.rotary import apply_rope, remove_rope
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.plan import HandoffPlan
from trtllm_kvmap.spec.slices import FIELDS, Field

SHIFT = 16  # tokens by which the control shifted_positions turns keys too far


@dataclass(frozen=True, slots=True)
class Region:
    """Entries of a cache: fields, layers and heads; all mapped tokens (``kind`` None), or those of
    one kind or place, which every context has its own of.
    """

    group: str
    name: str
    fields: tuple[Field, ...]
    layers: range
    heads: range
    kind: str | None = None


def regions(spec: ModelSpec, positions: Sequence[str], kinds: Sequence[str]) -> Iterator[Region]:
    """Every region that is replaced, one at a time and cumulatively, in the order of the report.

    ``positions`` and ``kinds`` are the names of the groups of tokens.
    """
    layers, heads = range(spec.num_layers), range(spec.num_kv_heads)
    for field in FIELDS:
        yield Region("field", f"{field}s", (field,), layers, heads)
    for layer in layers:
        only = range(layer, layer + 1)
        yield Region("layer", f"layer {layer}", FIELDS, only, heads)
        for field in FIELDS:
            yield Region("layer", f"{field}s of layer {layer}", (field,), only, heads)
    if len(heads) > 1:
        for layer in layers:
            for head in heads:
                name = f"head {head} of layer {layer}"
                one = range(head, head + 1)
                yield Region("head", name, FIELDS, range(layer, layer + 1), one)
    for group, names in (("position", positions), ("kind", kinds)):
        for name in names:
            yield Region(group, name, FIELDS, layers, heads, kind=name)
    for layer in layers:
        yield Region("layers_below", f"layers 0-{layer}", FIELDS, range(layer + 1), heads)
    for layer in reversed(layers):
        last = spec.num_layers - 1
        yield Region(
            "layers_above", f"layers {layer}-{last}", FIELDS, range(layer, last + 1), heads
        )


@torch.no_grad()
def mapped_entries(bridge: KvBridge, reading: Reading, plan: HandoffPlan) -> HfCache:
    """The target's cache of everything before ``plan.repaired``: first tokens its own, the rest
    mapped.
    """
    context = torch.tensor(reading.item.context)
    first = plan.first.stop
    converted = bridge.convert(reading.source.cache, context, first_tokens=first)
    return fork(converted, plan.mapped.stop)


def go_on(reading: Reading, plan: HandoffPlan, entries: HfCache) -> Ready:
    """The target once it has computed the repaired window on top of ``entries``."""
    target, context = reading.target.model, reading.item.context
    read = prefill(target, context[plan.repaired.start :], fork(entries), logits_to_keep=1)
    return Ready(target, read.cache, read.logits[-1], len(context), plan.mapped)


def replaced(
    reading: Reading,
    plan: HandoffPlan,
    entries: HfCache,
    region: Region,
    tokens: Sequence[int] | None = None,
) -> HfCache:
    """A copy of ``entries`` of which ``region`` holds the target's own keys and values, at the
    positions ``tokens`` (None: all mapped ones).
    """
    native, cache = view_pool(reading.target.cache), copied(reading.target.model.spec, entries)
    pool = view_pool(cache)
    where = torch.tensor(list(plan.mapped) if tokens is None else list(tokens), dtype=torch.int64)
    heads = torch.tensor(list(region.heads))
    for field in region.fields:
        ours, theirs = pool.field(field)[0], native.field(field)[0]
        for layer in region.layers:
            ours[layer][0, heads[:, None], where] = theirs[layer][0, heads[:, None], where]
    return cache


def copied(spec: ModelSpec, entries: HfCache) -> HfCache:
    """A cache of its own tensors with the same entries."""
    pool = view_pool(entries)
    cache = make_cache(spec, num_entries(entries), dtype=pool.dtype, device=pool.device)
    put_cache(cache, entries)
    return cache


Spoiler = Callable[[KvBridge, Reading, HandoffPlan, HfCache], HfCache]


def permuted_heads(
    bridge: KvBridge, reading: Reading, plan: HandoffPlan, entries: HfCache
) -> HfCache:
    """What the map makes of a source whose KV heads stand in other places."""
    source = reading.source
    if source.model.spec.num_kv_heads == 1:
        raise Refused(f"{source.model.spec.name} has one KV head; there is nothing to permute")
    turned = copied(source.model.spec, source.cache)
    pool = view_pool(turned)
    for view in pool.keys + pool.values:
        view.copy_(view.roll(1, dims=1))
    context = torch.tensor(reading.item.context)
    converted = bridge.convert(turned, context, first_tokens=plan.first.stop)
    return fork(converted, plan.mapped.stop)


def shifted_positions(
    bridge: KvBridge, reading: Reading, plan: HandoffPlan, entries: HfCache
) -> HfCache:
    """Mapped keys rotated for positions SHIFT tokens too late, as a map that forgets RoPE would."""
    target, stop = reading.target.model, plan.mapped.stop
    cache = copied(target.spec, entries)
    where = torch.arange(plan.mapped.start, stop, device=target.device)
    rope, length = target.spec.rope, target.rope_length(len(reading.item.context))
    for keys in view_pool(cache).keys:
        span = keys[0, :, plan.mapped.start : stop]
        content = remove_rope(span.double(), where, rope, length)
        span.copy_(apply_rope(content, where + SHIFT, rope, length))
    return cache


def shifted_values(
    bridge: KvBridge, reading: Reading, plan: HandoffPlan, entries: HfCache
) -> HfCache:
    """Mapped values that stand one token late, beside the keys of their neighbours."""
    cache = copied(reading.target.model.spec, entries)
    for values in view_pool(cache).values:
        span = values[0, :, plan.mapped.start : plan.mapped.stop]
        span.copy_(span.roll(1, dims=1))
    return cache


CONTROLS: dict[str, Spoiler] = {
    "permuted_heads": permuted_heads,
    "shifted_positions": shifted_positions,
    "shifted_values": shifted_values,
}
