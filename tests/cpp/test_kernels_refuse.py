"""Bad calls: one sentence each, and not a byte is written."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from emulated_cases import NEEDS_EMULATOR, prepare_built
from half_cases import build, build_rounded, raw, with_dtype
from native_kernels import RefusedError, call, emulated, map_spec, pack, prepare, require
from native_structs import BFLOAT16, FLOAT8, FLOAT16, HOPPER, MapParams, MapSpec, Status

from cases import SCOPES, SECONDS  # isort: skip

CASE = with_dtype(next(case for case in SCOPES if case.id == "slice-with-own-layer-0"), "bfloat16")

pytestmark = NEEDS_EMULATOR


@pytest.fixture(scope="module")
def library() -> c.CDLL:
    return emulated()


def change(path: str, value: object) -> Callable[[MapParams], None]:
    """Set ``a.b[1].c`` of the params."""

    def apply(params: MapParams) -> None:
        *parents, last = path.replace("[", ".").replace("]", "").split(".")
        here: object = params
        for name in parents:
            here = here[int(name)] if name.isdigit() else getattr(here, name)  # type: ignore[index]
        if last.isdigit():
            here[int(last)] = value  # type: ignore[index]
        else:
            setattr(here, last, value)

    return apply


BAD = {
    "version": (change("map.version", 1), "version 1"),
    "compute type": (change("map.compute_type", 3), "in type 3 and keeps weights in type 2"),
    "weight type": (change("map.weight_type", 1), "in type 2 and keeps weights in type 1"),
    "no map": (change("map.blob", None), "buffer"),
    "misaligned map": (change("map.blob", 4100), "aligned to 64 bytes"),
    "layers": (change("source.num_layers", 2), "source pool holds"),
    "heads": (change("target.num_kv_heads", 7), "target pool holds"),
    "head_dim": (change("target.head_dim", 32), "target pool holds"),
    "dtype": (change("source.dtype", 4), "dtype is 4"),
    "blocks": (change("source.num_blocks", 0), "0 blocks"),
    "tokens per block": (change("target.tokens_per_block", 0), "blocks of 0"),
    "stride": (change("target.token_stride", -1), "negative"),
    "channel stride": (change("target.channel_stride", 0), "positive"),
    "scale": (change("target.scale[1]", 0.0), "value scale is 0"),
    "scale NaN": (change("source.scale[0]", float("nan")), "key scale is nan"),
    "null layer": (change("target.layers[1][2]", None), "layer 2 has its values"),
    "odd address": (change("source.layers[0][0]", 4097), "aligned to 2"),
    "tokens": (change("span.num_tokens", -1), "-1 tokens"),
    "chunk": (change("chunk_tokens", -5), "chunks of -5"),
    "long chunk": (change("chunk_tokens", 65537), "above 65536"),
    "index type": (change("span.index_type", 2), "index type is 2"),
    "no source slots": (change("span.source_slots", None), "source slots"),
    "no target slots": (change("span.target_slots", None), "target slots"),
    "no positions": (change("span.positions", None), "lacks positions"),
    "no token ids": (change("span.token_ids", None), "token ids"),
    "no table": (change("token_table.fields[0]", None), "token table"),
    "no vocabulary": (change("token_table.vocab_size", 0), "token table"),
    "no cos": (change("source_rope.cos", None), "source's RoPE"),
    "no positions in table": (change("target_rope.num_positions", 0), "target's RoPE"),
    "rope scale": (change("target_rope.scale", 0.0), "target's RoPE"),
    "variant": (change("variant", 9), "Variant 9"),
    "no workspace": (change("workspace", None), "workspace"),
    "misaligned workspace": (change("workspace", 4100), "align it"),
}
ONLY_GPU = ("variant", "no workspace", "misaligned workspace")


@pytest.mark.parametrize("function", ["kernelValidate", "kernelMap", "kernelMapCpu"])
@pytest.mark.parametrize("what", BAD)
def test_kernels_refuse(library: c.CDLL, what: str, function: str) -> None:
    if function == "kernelMapCpu" and what in ONLY_GPU:
        pytest.skip("the CPU version has no workspace and no variants")
    apply, words = BAD[what]
    built = build_rounded(CASE, torch.bfloat16)
    before = raw(built.target_memory)
    prepared = prepare(
        library, built.kvmap, built.source, built.target, built.span, compute_type=BFLOAT16
    )
    apply(prepared.params)
    with pytest.raises(RefusedError, match=words):
        call(library, function, prepared)
    assert torch.equal(raw(built.target_memory), before)


def test_kernels_refuse_a_workspace_one_byte_short(library: c.CDLL) -> None:
    built = build_rounded(CASE, torch.bfloat16)
    prepared = prepare(
        library, built.kvmap, built.source, built.target, built.span, compute_type=BFLOAT16
    )
    needed = prepared.params.workspace_bytes
    prepared.params.workspace_bytes = needed - 1
    with pytest.raises(RefusedError, match=f"has {needed - 1} bytes.*needs {needed}"):
        call(library, "kernelMap", prepared)


@pytest.mark.parametrize(
    ("compute_type", "words"), [(FLOAT16, "pack the map in it"), (BFLOAT16, "multiples of 64")]
)
def test_kernels_refuse_what_the_hopper_kernel_cannot(
    library: c.CDLL, compute_type: int, words: str
) -> None:
    built = build_rounded(CASE, torch.bfloat16)
    before = raw(built.target_memory)
    prepared = prepare_built(
        library,
        built,
        compute_type=compute_type,
        variant=HOPPER,
    )
    with pytest.raises(RefusedError, match=words):
        call(library, "kernelMap", prepared)
    assert torch.equal(raw(built.target_memory), before)


def test_kernels_refuse_float8_weights_for_the_hopper_kernel(library: c.CDLL) -> None:
    built = build_rounded(CASE, torch.bfloat16)
    prepared = prepare_built(library, built, compute_type=BFLOAT16, variant=HOPPER)
    prepared.params.map.weight_type = FLOAT8
    with pytest.raises(RefusedError, match="keeps them in fp8-e4m3"):
        call(library, "kernelValidate", prepared)


def test_kernels_refuse_a_float8_weight_that_is_no_number(library: c.CDLL) -> None:
    """The scalar version would say NaN where the kernels, which do not look, say 480."""
    built = build(next(case for case in SECONDS if case.id == "float8-weights"))
    weight = built.kvmap.groups[2].weight
    assert weight is not None
    weight.view(torch.uint8)[5, 7] = 0xFF
    with pytest.raises(RefusedError, match="Group 2 has a weight that is not a number"):
        pack(library, built.kvmap, BFLOAT16)


def test_kernels_accept_an_empty_span_without_anything(library: c.CDLL) -> None:
    built = build_rounded(replace(CASE, num_tokens=0), torch.bfloat16)
    prepared = prepare(
        library, built.kvmap, built.source, built.target, built.span, compute_type=BFLOAT16
    )
    before = raw(built.target_memory)
    prepared.params.span.source_slots = None
    prepared.params.token_table.fields[0] = None
    call(library, "kernelMap", prepared)
    call(library, "kernelMapCpu", prepared)
    assert torch.equal(raw(built.target_memory), before)


def set_group(name: str, value: object) -> Callable[[MapSpec], None]:
    return lambda spec: setattr(spec.groups[1], name, value)


def scale_a_copy(spec: MapSpec) -> None:
    group = spec.groups[1]
    group.weight = group.bias = None
    group.num_slices = group.num_heads
    group.scale = 4096


BAD_SPECS: dict[str, tuple[Callable[[MapSpec], None], str]] = {
    "no layers": (lambda s: setattr(s.source, "num_layers", 0), "source has 0 layers"),
    "too many layers": (lambda s: setattr(s.target, "num_layers", 129), "1 to 128 layers"),
    "odd head_dim": (lambda s: setattr(s.target, "head_dim", 63), "head_dim is 63"),
    "rotary_dim": (lambda s: setattr(s.target, "rotary_dim", 66), "rotary_dim is 66"),
    "compute type": (lambda s: setattr(s, "compute_type", 3), "got type 3"),
    "layer": (set_group("layer", 4), "layer below 4"),
    "field": (set_group("field", 2), "needs a field"),
    "no heads": (set_group("num_heads", 0), "0 heads"),
    "head": (lambda s: s.groups[1].heads.__setitem__(0, 3), "writes head 3"),
    "slice layer": (lambda s: setattr(s.groups[1].slices[0], "layer", 9), "reads layer 9"),
    "slice head": (lambda s: setattr(s.groups[1].slices[0], "head", -1), "head -1"),
    "no bias": (set_group("bias", None), "a matrix and a bias"),
    "scales of a copy": (scale_a_copy, "copies heads and has scales"),
    "weight type": (lambda s: setattr(s, "weight_type", FLOAT16), "kept in the type of the"),
}


@pytest.mark.parametrize("what", BAD_SPECS)
def test_kernels_refuse_to_pack(library: c.CDLL, what: str) -> None:
    apply, words = BAD_SPECS[what]
    built = build_rounded(CASE, torch.bfloat16)
    spec, _kept = map_spec(built.kvmap, BFLOAT16)
    apply(spec)
    size, status = c.c_size_t(), Status()
    library.kernelPackedMapSize(c.byref(spec), c.byref(size), c.byref(status))
    with pytest.raises(RefusedError, match=words):
        require(status)


def test_kernels_refuse_a_buffer_too_small_to_pack(library: c.CDLL) -> None:
    built = build_rounded(CASE, torch.bfloat16)
    packed, blob = pack(library, built.kvmap, BFLOAT16)
    spec, _kept = map_spec(built.kvmap, BFLOAT16)
    status = Status()
    library.kernelPackMap(
        c.byref(spec),
        c.c_void_p(blob.data_ptr()),
        c.c_size_t(packed.bytes - 1),
        c.byref(packed),
        c.byref(status),
    )
    with pytest.raises(RefusedError, match=f"buffer of {packed.bytes} bytes"):
        require(status)
