"""The same maths in eager torch: what the kernels are compared with, in result and in time.

Each source layer is gathered and un-rotated once, every target layer is one or a few matrix
products in the cache's dtype, and the result is rotated and scattered: what one would write without
a kernel of one's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.mapper.contract import Span, same_rotation
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.rotary import applying_rows, removing_rows, rotate_
from trtllm_kvmap.spec.slices import FIELDS, Field


@dataclass(frozen=True)
class Product:
    """All heads of one layer and field. With ``columns`` [heads, inputs] each head reads its own
    columns and ``weight`` is [heads, inputs, head_dim]; else weight is [inputs, heads * head_dim].
    """

    group_layers: tuple[int, ...]
    columns: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor


class EagerMap:
    """A map of pooled, head, slice or copied groups on the pools' device, in ``dtype``. Every
    target layer's matrix has memory of its own, as it would have after loading.
    """

    def __init__(self, kvmap: KvMap, device: torch.device, dtype: torch.dtype) -> None:
        self._kvmap = kvmap
        self._device = device
        self._dtype = dtype
        by_layer: dict[tuple[Field, int], list[HeadGroup]] = {}
        for group in kvmap.groups:
            by_layer.setdefault((group.field, group.layer), []).append(group)
        self._groups = by_layer
        self._products = {
            key: self._product(groups)
            for key, groups in by_layer.items()
            if groups[0].weight is not None
        }

    def _product(self, groups: list[HeadGroup]) -> Product:
        dim, heads = self._kvmap.source.head_dim, self._kvmap.source.num_kv_heads
        layers = tuple(sorted({s.layer for group in groups for s in group.slices}))
        place = {layer: index for index, layer in enumerate(layers)}
        rows = [
            torch.cat(
                [torch.arange(dim) + (place[s.layer] * heads + s.head) * dim for s in group.slices]
            )
            for group in groups
        ]
        weights = [w for w in (g.matrix() for g in groups) if w is not None]
        biases = torch.cat([g.bias for g in groups if g.bias is not None])
        bias = biases.to(self._device, self._dtype)
        if len(groups) == 1:
            every = torch.equal(rows[0], torch.arange(len(layers) * heads * dim))
            assert every, "a pooled map reads whole layers, in order"
            return Product(layers, None, weights[0].to(self._device, self._dtype, copy=True), bias)
        weight = torch.stack(weights).to(self._device, self._dtype, copy=True)
        return Product(layers, torch.stack(rows).to(self._device), weight, bias)

    @torch.no_grad()
    def map_kv(self, source: KvPool, target: KvPool, span: Span) -> None:
        """As a backend's, for a span on the device without skips."""
        blocks, offsets = divided(span.source_slots, source.tokens_per_block)
        out_blocks, out_offsets = divided(span.target_slots, target.tokens_per_block)
        f32 = torch.float32
        ropes = self._kvmap.source.rope, self._kvmap.target.rope
        off = removing_rows(span.positions, ropes[0], span.source_length, f32)
        on = applying_rows(span.positions, ropes[1], span.target_length, f32)
        turn = not (not self._products and same_rotation(self._kvmap, span))
        for field in FIELDS:
            views, _ = source.field(field)
            content = {}
            for layer, view in enumerate(views):
                x = view[blocks, :, offsets]  # [tokens, heads, head_dim]
                if field == "key" and turn:
                    x = self._rotated(x, off, ropes[0].interleaved)
                content[layer] = x
            for layer, view in enumerate(target.field(field)[0]):
                y = self._mapped(field, layer, content)
                if field == "key" and turn:
                    y = self._rotated(y, on, ropes[1].interleaved)
                view[out_blocks, :, out_offsets] = y.to(view.dtype)

    def _rotated(
        self, x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], interleaved: bool
    ) -> torch.Tensor:
        wide = x.float().transpose(0, 1).contiguous()
        rotate_(wide, *rows, interleaved)
        return wide.transpose(0, 1).to(x.dtype)

    def _mapped(self, field: Field, layer: int, content: dict[int, torch.Tensor]) -> torch.Tensor:
        groups = self._groups[field, layer]
        target = self._kvmap.target
        if groups[0].weight is None:
            return torch.stack(
                [content[s.layer][:, s.head] for group in groups for s in group.slices], dim=1
            )
        product = self._products[field, layer]
        x = torch.cat([content[source].flatten(1) for source in product.group_layers], dim=1)
        if product.columns is None:
            y = torch.addmm(product.bias, x, product.weight)
        else:
            y = torch.bmm(x[:, product.columns].transpose(0, 1), product.weight)
            y = y.transpose(0, 1).flatten(1) + product.bias
        return y.unflatten(1, (target.num_kv_heads, target.head_dim))


def divided(slots: torch.Tensor, tokens_per_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // tokens_per_block, slots % tokens_per_block
