"""Tensors for a case: a random map, a source pool with NaN wherever it must not be read, and a
target pool full of one byte.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from cases import VOCABULARY, Case, Side

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.native import TokenTable
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.mapper.contract import Span
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.spec.layout import BlockTable
from trtllm_kvmap.spec.slices import FIELDS, Slice, nearest_depth, own_slices, source_slices

SENTINEL_BYTE = 0x5A  # an ordinary number in every cache dtype, far from what a map gives
NAN_BYTE = 0xFF  # a NaN in every cache dtype

Views = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Built:
    """``source_memory`` and ``target_memory`` are the whole storages behind the pools, flat."""

    kvmap: KvMap
    source: KvPool
    target: KvPool
    span: Span
    source_memory: torch.Tensor
    target_memory: torch.Tensor


def build(case: Case) -> Built:
    """Equal cases give equal tensors."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
    kvmap = random_map(case, generator)
    span = _span(case, generator)
    source_memory, source = _pool(case.source, case, NAN_BYTE)
    target_memory, target = _pool(case.target, case, SENTINEL_BYTE)
    named = span.source_slots[span.source_slots >= 0]
    for views, scale in ((source.keys, source.key_scale), (source.values, source.value_scale)):
        for view in views:
            block, offset = named // view.shape[2], named % view.shape[2]
            real = torch.randn(len(named), view.shape[1], view.shape[3], generator=generator)
            real[..., 0] = 0.0  # a copy must keep it, though turning to and fro would not
            view[block, :, offset] = (real / scale).to(view.dtype)
    return Built(kvmap, source, target, span, source_memory, target_memory)


def views_of(side: Side, case: Case, memory: torch.Tensor) -> Views:
    """The key and value views, [num_blocks, heads, tokens_per_block, head_dim], of flat memory."""
    blocks, tokens = _pages(side, case)
    layers, heads, dim = side.layers, side.heads, side.head_dim
    if side.storage == "trtllm":
        pool = memory.view(blocks, layers, 2, heads, tokens, dim)
        fields = [[pool[:, layer, field] for layer in range(layers)] for field in (0, 1)]
    elif side.storage == "dense":
        pool = memory.view(2, layers, 1, heads, tokens, dim)
        fields = [[pool[field, layer] for layer in range(layers)] for field in (0, 1)]
    else:
        pool = memory.view(blocks, tokens + 1, 2, layers, heads + 1, dim + 5)
        pool = pool[:, :tokens, :, :, :heads, :dim].permute(2, 3, 0, 4, 1, 5)
        fields = [[pool[field, layer] for layer in range(layers)] for field in (0, 1)]
    return tuple(fields[0]), tuple(fields[1])


def memory_size(side: Side, case: Case) -> int:
    """Elements of the storage of one side."""
    blocks, tokens = _pages(side, case)
    if side.storage == "odd":
        return blocks * (tokens + 1) * 2 * side.layers * (side.heads + 1) * (side.head_dim + 5)
    return blocks * tokens * 2 * side.layers * side.heads * side.head_dim


def _pages(side: Side, case: Case) -> tuple[int, int]:
    """(num_blocks, tokens_per_block): room for the span, and some slots that it does not name."""
    needed = case.first_slot_offset + case.num_tokens
    if side.storage == "dense":
        return 1, needed + 3
    return math.ceil(needed / side.tokens_per_block) + 2, side.tokens_per_block


def _pool(side: Side, case: Case, byte: int) -> tuple[torch.Tensor, KvPool]:
    memory = torch.empty(memory_size(side, case), dtype=getattr(torch, side.dtype))
    memory.view(torch.uint8).fill_(byte)
    keys, values = views_of(side, case, memory)
    return memory, KvPool(keys, values, side.key_scale, side.value_scale)


def _span(case: Case, generator: torch.Generator) -> Span:
    first = case.first_position
    positions = case.positions or tuple(range(first, first + case.num_tokens))
    end = max(positions, default=0) + 1
    source, target = case.source, case.target
    return Span(
        source_slots=_slots(source, case, generator),
        target_slots=_slots(target, case, generator),
        positions=torch.tensor(positions, dtype=torch.int64),
        token_ids=torch.randint(0, VOCABULARY, (case.num_tokens,), generator=generator),
        source_length=end if source.length is None else source.length,
        target_length=end if target.length is None else target.length,
    )


def _slots(side: Side, case: Case, generator: torch.Generator) -> torch.Tensor:
    blocks, tokens_per_block = _pages(side, case)
    order = torch.randperm(blocks, generator=generator) if side.shuffled else torch.arange(blocks)
    table = BlockTable(tuple(order.tolist()), tokens_per_block)
    slots = torch.from_numpy(table.slot_mapping(case.first_slot_offset, case.num_tokens))
    slots[list(side.skipped)] = -1
    return slots


def random_map(case: Case, generator: torch.Generator) -> KvMap:
    """A map of the case's scope whose outputs are about as large as its inputs."""
    source, target = case.source.spec, case.target.spec
    groups = []
    for field in FIELDS:
        for layer in range(target.num_layers):
            for heads, slices in _reads(case, field, layer, generator):
                groups.append(_group(case, field, layer, heads, slices, generator))
    shape = VOCABULARY, target.num_kv_heads, target.head_dim
    table = TokenTable(*(torch.randn(shape, generator=generator) for _ in FIELDS))
    blank = Fingerprint("", "", "")
    return KvMap(source, target, blank, blank, "slice", tuple(groups), fitted={}, token_table=table)


def _reads(
    case: Case, field: str, layer: int, generator: torch.Generator
) -> list[tuple[tuple[int, ...], tuple[Slice, ...]]]:
    """(target heads, the slices they read) for one layer and field."""
    source, heads = case.source.spec, range(case.target.heads)
    every = source_slices(field, source.num_layers, source.num_kv_heads)
    near = nearest_depth(layer, case.target.layers, source.num_layers)
    both = tuple(
        s for f in FIELDS for s in source_slices(f, source.num_layers, source.num_kv_heads)
    )
    own = own_slices(field, case.target.heads)

    def some(of: tuple[Slice, ...], count: int = 3) -> tuple[Slice, ...]:
        return tuple(of[i] for i in torch.randperm(len(of), generator=generator)[:count].tolist())

    layers = {near, (near + 1) % source.num_layers}
    match case.scope:
        case "copy":
            return [(tuple(heads), tuple(Slice("source", field, near, h) for h in heads))]
        case "copy-crossed":  # keys from values, values from own values
            crossed = tuple(Slice("source", "value", near, h) for h in heads)
            return [(tuple(heads), crossed if field == "key" else own)]
        case "blend":
            copied = [((h,), (Slice("source", field, near, h),)) for h in heads if h != layer % 2]
            return [*copied, ((layer % 2,), some(every))]
        case "head":
            return [
                ((h,), tuple(s for s in every if s.head == h and s.layer in layers)) for h in heads
            ]
        case "pooled":
            return [(tuple(heads), tuple(s for s in every if s.layer in layers))]
        case "pooled-all":
            return [(tuple(heads), every)]
        case "pooled-mixed":
            return [(tuple(heads), both[layer % 2 :])]  # two lists, each read by both fields
        case "pooled-own":
            return [(tuple(heads), (*own, *every))]
        case "slice-mixed":
            return [((h,), some(both, 4)) for h in heads]
        case "slice-own":
            return [((h,), some((*every, *own), 4)) for h in heads]
        case "slice-twice":
            return [((h,), (every[h], every[-1], every[h])) for h in heads]
    return [((h,), some(every)) for h in heads]


def _group(
    case: Case,
    field: str,
    layer: int,
    heads: tuple[int, ...],
    slices: tuple[Slice, ...],
    generator: torch.Generator,
) -> HeadGroup:
    if case.scope.startswith("copy") or (case.scope == "blend" and len(slices) == 1):
        return HeadGroup(field, layer, heads, slices, weight=None, bias=None)
    widths = {"source": case.source.head_dim, "target": case.target.head_dim}
    width, out = sum(widths[s.origin] for s in slices), len(heads) * case.target.head_dim
    weight = torch.randn(width, out, generator=generator) / math.sqrt(width)
    bias = torch.randn(out, generator=generator)
    beside = _beside(case, width, out, generator)
    if case.second in ("low-rank", "silu-alone"):
        return HeadGroup(field, layer, heads, slices, None, bias, **beside)
    if case.second == "float8":
        scale = 0.5 + torch.rand(out, generator=generator)
        stored = (weight / scale).to(torch.float8_e4m3fn)
        return HeadGroup(field, layer, heads, slices, stored, bias, weight_scale=scale)
    return HeadGroup(field, layer, heads, slices, weight, bias, **beside)


def _beside(case: Case, width: int, out: int, generator: torch.Generator) -> dict[str, SecondTerm]:
    """The second term, of 6 hidden channels; its activation is in the name of ``case.second``."""
    if case.second in ("", "float8"):
        return {}
    term = SecondTerm(
        down=torch.randn(width, 6, generator=generator) / math.sqrt(width),
        offset=torch.randn(6, generator=generator),
        up=torch.randn(6, out, generator=generator) / math.sqrt(6),
        activation="silu" if case.second.startswith("silu") else "identity",
    )
    return {"second": term}
