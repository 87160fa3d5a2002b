"""A bias of its own for each stretch of positions (run it through bench.py fits).

A map has one bias a head and adds it wherever a token stands. Here the mean of what it leaves is
taken for each stretch of positions apart, over the calibration documents, and added as well. No
file holds such a bias; it is put on behind the map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.calibrate.capture import capture_kv, captured
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.mapper.contract import Mapper, Span
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import apply_rope

STRETCHES = (256, 64)


def position_bias_curve(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    texts: Sequence[Item],
    figures: Callable[[KvBridge], dict[str, Any]],
) -> list[dict[str, Any]]:
    """One row for ``kvmap`` as it is (stretch 0) and one for each length of a stretch."""
    rows = []
    for stretch in (0, *STRETCHES):
        bridge = KvBridge(kvmap, source=source, target=target)
        if stretch:
            bias = mean_left(bridge, texts, stretch)
            bridge.mapper = BiasedByPosition(bridge.mapper, stretch, *bias)
        rows.append({"stretch": stretch, **figures(bridge)})
    return rows


def mean_left(
    bridge: KvBridge, texts: Sequence[Item], stretch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of pre-RoPE keys and of values, the target's own less the mapped ones, mean over the tokens
    of each stretch: float32 [num_layers, num_kv_heads, stretches, head_dim]. Stretches that no
    document reaches take the last one's.
    """
    layers, heads, head_dim = bridge.target.spec.kv_shape
    longest = max(len(item.context) for item in texts)
    stretches = -(-longest // stretch)
    sums = torch.zeros(2, layers, heads, stretches, head_dim)
    counts = torch.zeros(stretches, 1)
    for item in texts:
        ids = torch.tensor(item.context)
        read = prefill(bridge.source, item.context, logits_to_keep=1).cache
        own = capture_kv(bridge.target, ids)
        made = captured(bridge.target, bridge.convert(read, item.context, first_tokens=1))
        where = torch.arange(len(ids)) // stretch
        for total, native, mapped in zip(
            sums, (own.keys, own.values), (made.keys, made.values), strict=True
        ):
            total.index_add_(2, where, native - mapped)
        counts.index_add_(0, where, torch.ones(len(ids), 1))
    keys, values = sums / counts
    return keys, values


@dataclass(frozen=True, slots=True)
class BiasedByPosition:
    """A mapper whose every token gets what its stretch of positions is given."""

    inner: Mapper
    stretch: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def kvmap(self) -> KvMap:
        return self.inner.kvmap

    def map_kv(self, source: KvPool, target: KvPool, span: Span) -> None:
        """Into a pool of one block, as the hf lane's is."""
        self.inner.map_kv(source, target, span)
        where = (span.positions // self.stretch).clamp_max(self.keys.shape[2] - 1)
        rope, slots = self.kvmap.target.rope, span.target_slots
        for layer, (keys, values) in enumerate(zip(target.keys, target.values, strict=True)):
            turned = apply_rope(
                self.keys[layer][:, where], span.positions, rope, span.target_length
            )
            keys[0][:, slots] += turned
            values[0][:, slots] += self.values[layer][:, where]
