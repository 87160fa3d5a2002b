"""The arms: each turns one reading into a model that is ready to go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.probe import Ready
from trtllm_kvmap.evaluate.reading import Reading, read_context
from trtllm_kvmap.inject.hf_cache import fork, make_cache, put_span, take_span
from trtllm_kvmap.spec.plan import HandoffPlan, plan_handoff
from trtllm_kvmap.spec.slices import FIELDS, Slice, nearest_depth

Arm = Callable[[Reading], Ready]
REPAIR_WINDOWS = (8, 16, 32, 64)


class Refused(Exception):  # noqa: N818 - not an error: the report prints the reason
    """An arm that this pair or these items do not allow."""


def make_arms(
    bridge: KvBridge, copy_bridge: KvBridge | Refused, *, first_tokens: int, repair_window: int
) -> dict[str, Arm]:
    """Every arm by name, in the order of the report. The native target and source come first,
    because the figures of all others are read against theirs.
    """
    windows = sorted({*REPAIR_WINDOWS, repair_window} - {0})
    plan = partial(plan_handoff, first_tokens=first_tokens)
    return {
        "target": lambda reading: reading.target,
        "source": lambda reading: reading.source,
        "mapped": partial(mapped, bridge, partial(plan, repair_window=0)),
        **{
            mapped_arm(window): partial(mapped, bridge, partial(plan, repair_window=window))
            for window in windows
        },
        "copy": partial(mapped, copy_bridge, partial(plan, repair_window=0)),
        "repair_only": partial(repair_only, partial(plan, repair_window=repair_window)),
        "wrong_document": partial(wrong_document, bridge, partial(plan, repair_window=0)),
        "wrong_document_repaired": partial(
            wrong_document, bridge, partial(plan, repair_window=repair_window)
        ),
        "no_context": partial(no_context, first_tokens),
        "reinjection": reinjection,
    }


def mapped_arm(repair_window: int) -> str:
    """The name of the mapped arm whose last ``repair_window`` tokens the target computes itself."""
    return f"mapped_repaired_{repair_window}" if repair_window else "mapped"


Planner = Callable[[int], HandoffPlan]


def mapped(bridge: KvBridge | Refused, planner: Planner, reading: Reading) -> Ready:
    """The source's cache through the map, first and last tokens as planned."""
    if isinstance(bridge, Refused):
        raise bridge
    token_ids = reading.item.context
    return _hand_over(bridge, reading, reading.source, token_ids, planner(len(token_ids)))


def wrong_document(bridge: KvBridge, planner: Planner, reading: Reading) -> Ready:
    """The same with a stranger's cache: what the target computes itself is still the true text."""
    if reading.stranger is None:
        raise Refused("there is no other document among the items; give at least two")
    plan = planner(len(reading.item.context))
    start, stop = plan.mapped.start, plan.mapped.stop
    token_ids = (
        *reading.item.context[:start],
        *reading.stranger.token_ids[start:stop],
        *reading.item.context[stop:],
    )
    return _hand_over(bridge, reading, reading.stranger.source, token_ids, plan)


def repair_only(planner: Planner, reading: Reading) -> Ready:
    """The tokens that a mapped arm computes itself, at their true positions, and nothing else."""
    token_ids, target = reading.item.context, reading.target.model
    plan = planner(len(token_ids))
    read = prefill(
        target,
        token_ids[plan.repaired.start :],
        fork(reading.target.cache, plan.first.stop),
        positions=torch.arange(plan.repaired.start, plan.repaired.stop),
        logits_to_keep=1,
    )
    return Ready(target, read.cache, read.logits[-1], len(token_ids))


def no_context(first_tokens: int, reading: Reading) -> Ready:
    """Only the first tokens (at least one, or nothing could be asked), as if the text ended
    there.
    """
    return read_context(reading.target.model, reading.item.context[: max(first_tokens, 1)])


def reinjection(reading: Reading) -> Ready:
    """The target's own cache taken out and put back into a new one: must change nothing."""
    native = reading.target
    taken = take_span(native.cache, range(native.position))
    cache = make_cache(native.model.spec, native.position, dtype=taken.dtype, device=taken.device)
    put_span(cache, 0, taken)
    return Ready(native.model, cache, native.logits, native.position)


def copy_map(kvmap: KvMap) -> KvMap:
    """The map of the same pair that learns nothing: each target head takes the same head of the
    layer at the nearest depth. Raises Refused where the shapes differ.
    """
    source, target = kvmap.source, kvmap.target
    if source.kv_shape[1:] != target.kv_shape[1:]:
        raise Refused(
            f"copy needs equal (KV heads, head_dim); {source.name} has {source.kv_shape[1:]} and "
            f"{target.name} {target.kv_shape[1:]}"
        )
    heads = tuple(range(target.num_kv_heads))
    groups = []
    for layer in range(target.num_layers):
        depth = nearest_depth(layer, target.num_layers, source.num_layers)
        for field in FIELDS:
            slices = tuple(Slice("source", field, depth, head) for head in heads)
            groups.append(HeadGroup(field, layer, heads, slices, weight=None, bias=None))
    return KvMap(
        source=source,
        target=target,
        source_fingerprint=kvmap.source_fingerprint,
        target_fingerprint=kvmap.target_fingerprint,
        scope="copy",
        groups=tuple(groups),
        fitted={},
        sinks=kvmap.sinks,
    )


def _hand_over(
    bridge: KvBridge,
    reading: Reading,
    source: Ready,
    token_ids: tuple[int, ...],
    plan: HandoffPlan,
) -> Ready:
    handed = bridge.hand_over(source.cache, torch.tensor(token_ids), plan)
    return Ready(
        reading.target.model, handed.cache, handed.logits.reshape(-1), plan.num_tokens, plan.mapped
    )
