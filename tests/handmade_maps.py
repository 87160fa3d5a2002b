"""Maps that no fit made: a copy of every head, and random matrices over random slices."""

from __future__ import annotations

from dataclasses import replace

import torch

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.native import SinkEntry, TokenTable
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.slices import FIELDS, Slice


def copy_map(source: LoadedModel, target: LoadedModel, sinks: tuple[SinkEntry, ...] = ()) -> KvMap:
    """Every target head is the source's same layer and head; needs equal geometry."""
    layers, heads, _ = target.spec.kv_shape
    groups = [
        HeadGroup(
            field=field,
            layer=layer,
            heads=tuple(range(heads)),
            slices=tuple(Slice("source", field, layer, head) for head in range(heads)),
            weight=None,
            bias=None,
        )
        for field in FIELDS
        for layer in range(layers)
    ]
    return _kvmap(source, target, "copy", groups, sinks)


def random_map(
    source: LoadedModel, target: LoadedModel, *, num_slices: int = 3, seed: int = 0
) -> KvMap:
    """Every target head reads ``num_slices`` random source slices of its field through a random
    matrix and bias.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = []
    width = num_slices * source.spec.head_dim
    choices = source.spec.num_layers * source.spec.num_kv_heads
    for field in FIELDS:
        for layer in range(target.spec.num_layers):
            for head in range(target.spec.num_kv_heads):
                chosen = torch.randperm(choices, generator=generator)[:num_slices].tolist()
                weight = torch.randn(width, target.spec.head_dim, generator=generator)
                groups.append(
                    HeadGroup(
                        field=field,
                        layer=layer,
                        heads=(head,),
                        slices=tuple(
                            Slice("source", field, *divmod(c, source.spec.num_kv_heads))
                            for c in chosen
                        ),
                        weight=weight / width**0.5,
                        bias=torch.randn(target.spec.head_dim, generator=generator),
                    )
                )
    return _kvmap(source, target, "slice", groups, ())


def own_layer_map(source: LoadedModel, target: LoadedModel) -> KvMap:
    """The target's layer 0 is read off its token table, every other layer copied from the source's.

    The table is the cache of every token alone at position 0, where RoPE does not turn.
    """
    every_token = torch.arange(target.spec.vocab_size)[:, None]
    layer = prefill(target, every_token).cache.layers[0]
    table = TokenTable(layer.keys[:, :, 0], layer.values[:, :, 0])
    heads, head_dim = target.spec.kv_shape[1:]
    groups = [
        HeadGroup(
            field=field,
            layer=0,
            heads=(head,),
            slices=(Slice("target", field, 0, head),),
            weight=torch.eye(head_dim),
            bias=torch.zeros(head_dim),
        )
        for field in FIELDS
        for head in range(heads)
    ]
    rest = [group for group in copy_map(source, target).groups if group.layer > 0]
    return replace(
        copy_map(source, target), scope="slice", groups=(*groups, *rest), token_table=table
    )


def _kvmap(
    source: LoadedModel,
    target: LoadedModel,
    scope: str,
    groups: list[HeadGroup],
    sinks: tuple[SinkEntry, ...],
) -> KvMap:
    return KvMap(
        source=source.spec,
        target=target.spec,
        source_fingerprint=source.fingerprint,
        target_fingerprint=target.fingerprint,
        scope=scope,
        groups=tuple(groups),
        fitted={"made": "by hand"},
        sinks=sinks,
    )
