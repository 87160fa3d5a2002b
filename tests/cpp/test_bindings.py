"""The torch operators on the CPU: every refusal, tracing, what a mapper keeps. The conformance
cases run on them as backend `cuda`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "conformance"))

from case_build import Built, build  # noqa: E402
from cases import BASE, CASES, SECONDS  # noqa: E402

from trtllm_kvmap.doctor import examine_machine  # noqa: E402
from trtllm_kvmap.errors import InputError, MismatchError, UnavailableError  # noqa: E402
from trtllm_kvmap.mapper import native  # noqa: E402
from trtllm_kvmap.mapper.backends import make_mapper  # noqa: E402
from trtllm_kvmap.mapper.cuda import CudaMapper, compute_dtype, pack_map  # noqa: E402
from trtllm_kvmap.rotary import applying_rows  # noqa: E402

pytestmark = pytest.mark.usefixtures("native_operators")


def raw(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(torch.uint8).view(memory.numel(), -1).clone()


def op_arguments(built: Built) -> dict[str, Any]:
    """What the operator is called with, by name, for a case on the CPU."""
    packed = pack_map(built.kvmap, compute_dtype(built.target), torch.device("cpu"))
    span, source, target = built.span, built.source, built.target
    every = torch.arange(64)
    ropes = [
        torch.stack(applying_rows(every, spec.rope, length, torch.float32))
        for spec, length in (
            (built.kvmap.source, span.source_length),
            (built.kvmap.target, span.target_length),
        )
    ]
    return {
        "packed_map": packed.blob,
        "layout": packed.layout,
        "source_keys": list(source.keys),
        "source_values": list(source.values),
        "target_keys": list(target.keys),
        "target_values": list(target.values),
        "scales": [1.0, 1.0, 1.0, 1.0],
        "source_slots": span.source_slots,
        "target_slots": span.target_slots,
        "positions": span.positions,
        "token_ids": None,
        "source_rope": ropes[0],
        "target_rope": ropes[1],
        "source_rope_scale": 1.0,
        "target_rope_scale": 1.0,
        "same_rotation": False,
        "token_table_keys": None,
        "token_table_values": None,
        "workspace": torch.empty(0, dtype=torch.uint8),
    }


def call(arguments: dict[str, Any]) -> None:
    torch.ops.trtllm_kvmap.map_kv(**arguments)


def with_first(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(indices: torch.Tensor) -> torch.Tensor:
        changed = indices.clone()
        changed[0] = value
        return changed

    return change


def shifted(blob: torch.Tensor) -> torch.Tensor:
    roomy = torch.empty(blob.numel() + 512, dtype=torch.uint8)
    return roomy[16 - roomy.data_ptr() % 16 + 16 :][: blob.numel()].copy_(blob)


def on_meta(views: list[torch.Tensor]) -> list[torch.Tensor]:
    return [views[0], *(view.to("meta") for view in views[1:])]


REFUSALS: tuple[tuple[str, str, Callable[[Any], Any], str], ...] = (
    ("slots of float", "source_slots", lambda x: x.float(), "int64 or int32"),
    ("slots of two dtypes", "target_slots", lambda x: x.int(), "of one dtype"),
    ("slots with a stride", "positions", lambda x: x.repeat_interleave(2)[::2], "contiguous"),
    ("too few slots", "source_slots", lambda x: x[:-1], r"\[13\]"),
    ("a source slot too high", "source_slots", with_first(10**6), "source_slots names 1000000"),
    ("a target slot too high", "target_slots", with_first(10**6), "target_slots names 1000000"),
    ("a slot below -1", "target_slots", with_first(-2), "-1 to"),
    ("a negative position", "positions", with_first(-1), "positions names -1"),
    ("a position past the table", "positions", with_first(64), "0 to 63"),
    ("views of float64", "target_keys", lambda x: [v.double() for v in x], "differ"),
    ("a view too few", "source_values", lambda x: x[:-1], "the map needs 3"),
    (
        "views of another shape",
        "source_keys",
        lambda x: [v[..., :16] for v in x],
        "32\\] is needed",
    ),
    (
        "views of other strides",
        "target_values",
        lambda x: [*x[:-1], x[-1].contiguous()],
        "one set of strides",
    ),
    ("views on another device", "target_keys", on_meta, "lies on meta"),
    ("a layout of another version", "layout", lambda x: [x[0] + 1, *x[1:]], "Pack the map again"),
    ("a layout cut short", "layout", lambda x: x[:-1], "Pack the map again"),
    ("a packed map cut short", "packed_map", lambda x: x[:-1], "as pack_map made it"),
    ("a packed map out of line", "packed_map", shifted, "aligned to 64"),
    ("a RoPE table of float64", "source_rope", lambda x: x.double(), "contiguous float32"),
    ("a RoPE table of another width", "target_rope", lambda x: x[..., :-1], "num_positions, 32"),
    ("two scales", "scales", lambda x: x[:2], "target key, target value"),
    ("a scale of zero", "scales", lambda x: [0.0, *x[1:]], "scale is 0"),
    ("a workspace of float", "workspace", lambda x: x.float(), "uint8"),
)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [pytest.param(*rest, id=title) for title, *rest in REFUSALS],
)
def test_bindings_refuse(name: str, change: Callable[[Any], Any], sentence: str) -> None:
    built = build(BASE)
    arguments = op_arguments(built)
    before = raw(built.target_memory)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=sentence):
        call(arguments)
    assert torch.equal(raw(built.target_memory), before), "a refused call wrote"


def test_bindings_need_token_ids_where_the_map_reads_them() -> None:
    case = next(case for case in CASES if case.id == "slice-with-own-layer-0")
    with pytest.raises(ValueError, match="token_ids, token_table_keys"):
        call(op_arguments(build(case)))


PACKING: tuple[tuple[str, Callable[[list[Any]], None], str], ...] = (
    ("a shape too short", lambda a: a[0].pop(), "is needed"),
    ("groups cut short", lambda a: a[2].pop(), "ends after|numbers left"),
    ("groups too long", lambda a: a[2].append(0), "one weight and one bias for each group"),
    ("a field that is none", lambda a: a[2].__setitem__(0, 2), "key 0, value 1"),
    ("a layer that is none", lambda a: a[2].__setitem__(1, 99), "a layer below 4"),
    ("a huge count", lambda a: a[2].__setitem__(3, 2**31 - 1), "numbers left"),
    ("a weight too narrow", lambda a: a[3].__setitem__(0, a[3][0][:, :-1].clone()), "it needs"),
    ("a bias too long", lambda a: a[4].__setitem__(0, torch.zeros(999)), "it needs"),
    ("a weight of half", lambda a: a[3].__setitem__(0, a[3][0].half()), "contiguous float32"),
    ("a bias too few", lambda a: a[4].pop(), "one of each"),
    ("products in float64", lambda a: a.__setitem__(6, torch.float64), "bfloat16"),
    ("a scale too long", lambda a: a[5].__setitem__(0, torch.ones(999)), "scale of"),
    ("a scale of half", lambda a: a[5].__setitem__(0, torch.ones(64).half()), "contiguous float32"),
    ("weights in float16", lambda a: a.__setitem__(7, torch.float16), "or in fp8-e4m3"),
    (
        "a float8 weight that is no number",
        lambda a: (a[3][0].fill_(torch.nan), a.__setitem__(7, torch.float8_e4m3fn)),
        "keeps numbers only",
    ),
)


@pytest.mark.parametrize(
    ("change", "sentence"), [pytest.param(*rest, id=title) for title, *rest in PACKING]
)
def test_bindings_refuse_to_pack(change: Callable[[list[Any]], None], sentence: str) -> None:
    kvmap, arguments = build(BASE).kvmap, []
    pack = torch.ops.trtllm_kvmap.pack_map

    class Recorder:
        def pack_map(self, *given: Any) -> tuple[torch.Tensor, list[int]]:
            arguments.extend(given)
            return pack(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "trtllm_kvmap", Recorder())
        pack_map(kvmap, torch.float32, torch.device("cpu"))
    change(arguments)
    with pytest.raises(ValueError, match=sentence):
        pack(*arguments)


def test_float8_weights_are_kept_where_all_of_them_are_stored_so() -> None:
    stored = build(next(case for case in SECONDS if case.id == "float8-weights-pooled")).kvmap
    cpu, bfloat16, float8 = torch.device("cpu"), 2, 3  # as mapKvCache.h numbers them
    kept = pack_map(stored, torch.bfloat16, cpu)
    assert kept.layout[1:3] == [bfloat16, float8]
    widened = pack_map(stored, torch.bfloat16, cpu, widen=True)
    assert widened.layout[1:3] == [bfloat16, bfloat16]
    weights = sum(g.weight.numel() for g in stored.groups if g.weight is not None)
    columns = sum(len(g.heads) for g in stored.groups) * stored.target.head_dim
    saved = widened.blob.numel() - kept.blob.numel()  # a byte a weight, four for each scale
    assert abs(saved - (weights - 4 * columns)) < 256

    first, *others = stored.groups
    mixed = replace(first, weight=first.matrix(), weight_scale=None)
    assert pack_map(replace(stored, groups=(mixed, *others)), torch.bfloat16, cpu).layout[2] != 3
    for variant, weight_type in (("auto", float8), ("hopper", bfloat16)):
        packed = CudaMapper(stored, variant).packed(cpu, torch.bfloat16)
        assert packed.layout[2] == weight_type, variant


def test_workspace_grows_to_a_bound() -> None:
    packed = pack_map(build(BASE).kvmap, torch.bfloat16, torch.device("cpu"))
    size = torch.ops.trtllm_kvmap.workspace_size
    assert size(packed.layout, 100, 256, 0) < size(packed.layout, 256, 256, 0)
    assert size(packed.layout, 256, 256, 0) == size(packed.layout, 10**6, 256, 0)
    with pytest.raises(ValueError, match="negative"):
        size(packed.layout, -1, 0, 0)


def test_bindings_pass_torchs_own_operator_check() -> None:
    """What the schema says is mutated, and what fake tensors give, agree with the operator."""
    built = build(BASE)
    arguments = {**op_arguments(built), "chunk_tokens": 0, "variant": 0}
    results = torch.library.opcheck(
        torch.ops.trtllm_kvmap.map_kv.default,
        args=tuple(arguments.values()),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(results.values()) == {"SUCCESS"}


def test_bindings_compile_into_one_graph() -> None:
    built, eager = build(BASE), build(BASE)
    call(op_arguments(eager))
    arguments = op_arguments(built)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(slots: torch.Tensor) -> torch.Tensor:
        call({**arguments, "target_slots": slots + 0})
        return slots * 2

    doubled = step(arguments["target_slots"])
    assert torch.equal(doubled, arguments["target_slots"] * 2)
    assert torch.equal(raw(built.target_memory), raw(eager.target_memory))


def test_fake_tensors_refuse_like_real_ones() -> None:
    arguments = op_arguments(build(BASE))
    meta = {
        name: [v.to("meta") for v in value]
        if isinstance(value, list) and isinstance(value[0], torch.Tensor)
        else value.to("meta")
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }
    meta["target_slots"] = meta["target_slots"].float()
    with pytest.raises(ValueError, match="int64 or int32"):
        call(meta)


def test_a_pool_of_uneven_strides_is_a_mismatch() -> None:
    built = build(BASE)
    keys = (*built.target.keys[:-1], built.target.keys[-1].contiguous())
    target = type(built.target)(keys, built.target.values)
    with pytest.raises(MismatchError, match="one set of strides"):
        CudaMapper(built.kvmap).map_kv(built.source, target, built.span)


def test_a_variant_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="use one of auto, wide"):
        CudaMapper(build(BASE).kvmap, variant="fast")


def test_what_a_build_cannot_do_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an operator built without CUDA answers pools on a GPU."""

    class Unable:
        def map_kv(self, *_: Any) -> None:
            raise NotImplementedError("This build has no CUDA kernels.\nException raised from ...")

    built = build(BASE)
    mapper = CudaMapper(built.kvmap)
    mapper.packed(built.target.device, torch.float32)
    monkeypatch.setattr(torch.ops, "trtllm_kvmap", Unable())
    with pytest.raises(UnavailableError, match=r"^This build has no CUDA kernels\.$"):
        mapper.map_kv(built.source, built.target, built.span)


def test_one_mapper_serves_spans_of_any_length() -> None:
    """Tables and packed maps are kept between calls; none may outlive what it was made for."""
    case = next(case for case in CASES if case.id == "rope-dynamic-target")
    short = build(case)
    mapper = CudaMapper(short.kvmap)
    mapper.map_kv(short.source, short.target, short.span)
    again, fresh = build(case), build(case)
    longer = type(short.span)(
        again.span.source_slots,
        again.span.target_slots,
        again.span.positions + 90,
        again.span.token_ids,
        source_length=again.span.source_length + 90,
        target_length=again.span.target_length + 90,
    )
    mapper.map_kv(again.source, again.target, longer)
    CudaMapper(fresh.kvmap).map_kv(fresh.source, fresh.target, longer)
    assert torch.equal(raw(again.target_memory), raw(fresh.target_memory))
    assert not torch.equal(raw(again.target_memory), raw(short.target_memory))


def test_a_native_part_that_is_missing_is_named(
    native_operators: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "FOLDERS", (tmp_path, native_operators.parent))
    assert native.native_library() == native_operators
    monkeypatch.setattr(native, "FOLDERS", (tmp_path,))
    monkeypatch.setattr(torch.ops, "trtllm_kvmap", object())
    assert native.native_library() is None
    with pytest.raises(UnavailableError, match=r"backend `cuda`.*build_native\.py"):
        make_mapper(build(BASE).kvmap, "cuda")
    assert "no backend cuda" in next(
        finding.detail for finding in examine_machine() if finding.name == "native kernels"
    )
    (tmp_path / native.NAME).write_bytes(b"not a library")
    with pytest.raises(UnavailableError, match="Build it again"):
        native.load_native()
