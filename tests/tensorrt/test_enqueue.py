"""What an enqueue writes and what it refuses, with the kernels on the CPU emulator. The whole of
the target's memory is compared with the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import BASE, CASES, SECONDS, Case
from expected import ABSOLUTE, expect
from harness import Plugin, Registry, Tensor
from plugin_case import PluginCase, dense_case, paged_case

BY_ID = {case.id: case for case in (*CASES, *SECONDS)}
UNTOUCHED = -7


def begun_at(case: Case, first: int) -> Case:
    """The span begins at position ``first``, and with it in the middle of a block."""
    return replace(case, id=f"{case.id}-at-{first}", first_position=first, first_slot_offset=first)


EXACT = (  # maps in float32: nothing is rounded but the result
    BASE,
    begun_at(BASE, 3),
    BY_ID["empty-span"],
    BY_ID["one-token"],
    BY_ID["blocks-16-to-64"],
    BY_ID["pooled-top-2"],
    BY_ID["slice-with-own-layer-0"],
    BY_ID["float8-weights-pooled"],
    BY_ID["copy"],
    BY_ID["copy-float8-rescaled"],
    begun_at(BY_ID["bfloat16-to-float8_e4m3fn"], 5),
    begun_at(BY_ID["rope-longrope-source"], 30),
    begun_at(BY_ID["rope-partial-interleaved-scaled-target"], 30),
)


def run(registry: Registry, case: PluginCase) -> tuple[int, Plugin]:
    plugin = registry.create(case.fields)
    assert plugin is not None
    assert plugin.change_shape(case.tensors) == 0
    case.give_workspace(plugin.workspace_size(case.tensors))
    return enqueue(plugin, case, case.tensors), plugin


def enqueue(plugin: Plugin, case: PluginCase, tensors: list[Tensor]) -> int:
    output: Any = case.output
    address = output.data_ptr() if isinstance(output, torch.Tensor) else output.ctypes.data
    return plugin.enqueue(tensors, case.addresses(), address, case.workspace.ctypes.data)


def raw(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(torch.uint8).view(memory.numel(), -1).clone()


def compare(case: PluginCase, unnamed: torch.Tensor, relative: float = 0.0) -> None:
    """The named slots hold the formula's numbers, all others ``unnamed``."""
    expected = expect(case.case, case.built)
    memory = case.built.target_memory
    assert torch.equal(raw(memory)[~expected.written], unnamed[~expected.written])
    found, wanted = memory.double()[expected.written], expected.values[expected.written]
    epsilon = torch.finfo(memory.dtype).eps + relative
    error = (found - wanted).abs()
    within = error <= ABSOLUTE[case.case.target.dtype] + relative + wanted.abs() * epsilon
    assert bool(within.all()), f"off by {error[~within][0]} at {wanted[~within][0]}"


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.id)
def test_lean_registry_enqueue_paged(lean_registry: Registry, case: Case) -> None:
    paged = paged_case(case)
    before = raw(paged.built.target_memory)
    assert run(lean_registry, paged)[0] == 0
    compare(paged, before)
    assert paged.output.tolist() == [case.num_tokens]


@pytest.mark.parametrize("second", ["", "float8"], ids=["half-weights", "float8-weights"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lean_registry_enqueue_on_tensor_cores(
    lean_registry: Registry, dtype: str, second: str
) -> None:
    case = replace(BY_ID[f"{dtype}-to-{dtype}"], second=second)
    paged = paged_case(begun_at(case, 6), compute=dtype)
    before = raw(paged.built.target_memory)
    assert run(lean_registry, paged)[0] == 0
    compare(paged, before, relative=2.0**-6 if dtype == "bfloat16" else 2.0**-9)


def test_lean_registry_enqueue_sequences_of_a_batch(lean_registry: Registry) -> None:
    case = begun_at(replace(BASE, num_tokens=29), 3)
    paged = paged_case(case, splits=(5, 0, 8))  # cut where blocks of 4 end
    before = raw(paged.built.target_memory)
    assert run(lean_registry, paged)[0] == 0
    compare(paged, before)
    assert paged.output.tolist() == [5, 0, 8, 16]


def test_lean_registry_enqueue_skips_and_counts_missing_blocks(lean_registry: Registry) -> None:
    paged = paged_case(begun_at(replace(BASE, num_tokens=29), 3))
    span = paged.built.span
    for side, slots, block in (
        ("source", span.source_slots, 2),
        ("target", span.target_slots, 1),
    ):
        tokens = paged.built.source if side == "source" else paged.built.target
        for name in (f"host_{side}_kv_cache_block_offsets", f"{side}_kv_cache_block_offsets"):
            paged.arrays[name][0, 0, :, block] = -1
        slots[span.positions // tokens.tokens_per_block == block] = -1
    before = raw(paged.built.target_memory)
    assert run(lean_registry, paged)[0] == 0
    compare(paged, before)
    kept = (span.source_slots >= 0) & (span.target_slots >= 0)
    assert paged.output.tolist() == [int(kept.sum())] == [17]


def test_lean_registry_enqueue_finds_layers_in_any_place(lean_registry: Registry) -> None:
    """The layers of a pool may lie in another order than the model's."""
    case = begun_at(BASE, 3)
    straight, turned = paged_case(case), paged_case(case)
    source, target = BASE.source, BASE.target
    pools = {
        "source": (turned.built.source_memory, source.layers, source.heads, source.head_dim),
        "target": (turned.built.target_memory, target.layers, target.heads, target.head_dim),
    }
    for side, (memory, layers, heads, dim) in pools.items():
        view = memory.view(-1, layers, 2, heads, getattr(case, side).tokens_per_block, dim)
        order = torch.arange(layers).roll(1)
        view.copy_(view[:, order].clone())  # layer l lies at place order^-1(l)
        places = torch.argsort(order).numpy().astype(np.int32)
        turned.arrays[f"host_{side}_kv_cache_pool_mapping"][:, 1] = places
    for each in (straight, turned):
        assert run(lean_registry, each)[0] == 0
    view = turned.built.target_memory.view(-1, target.layers, 2, target.heads, 4, target.head_dim)
    back = view[:, torch.argsort(torch.arange(target.layers).roll(1))].reshape(-1)
    assert torch.equal(raw(back.contiguous()), raw(straight.built.target_memory))


def test_lean_registry_enqueue_dense(lean_registry: Registry) -> None:
    sides = {
        name: replace(getattr(BASE, name), tokens_per_block=16, shuffled=False)
        for name in ("source", "target")
    }
    dense = dense_case(replace(BASE, **sides, first_position=7))
    assert run(lean_registry, dense)[0] == 0
    compare(dense, torch.zeros_like(raw(dense.built.target_memory)))


def null_pool(side: str) -> Callable[[PluginCase], None]:
    return lambda case: case.arrays[f"host_{side}_kv_cache_pool_pointers"].fill(0)


def put(name: str, index: tuple[int, ...], value: int) -> Callable[[PluginCase], None]:
    def change(case: PluginCase) -> None:
        case.arrays[name][index] = value

    return change


TARGET = "host_target_kv_cache_block_offsets"
SOURCE = "host_source_kv_cache_block_offsets"
MAPPING = "host_target_kv_cache_pool_mapping"
REFUSED: tuple[tuple[str, Callable[[PluginCase], None], str], ...] = (
    ("a null source pool", null_pool("source"), "source's pool pointer is null"),
    ("a null target pool", null_pool("target"), "target's pool pointer is null"),
    ("no blocks", put("host_num_blocks", (1,), 0), "target's pool is said to have 0 blocks"),
    ("a block too far", put("host_num_blocks", (0,), 1), "of a block below 1"),
    ("a key of another layer", put(SOURCE, (0, 0, 0, 0), 2), "(block * 3 layers) * 2"),
    ("a value apart from its key", put(TARGET, (0, 0, 1, 0), 0), "the number after it"),
    ("a block in the host's pool", put(TARGET, (0, 0, 0, 0), -(2**31)), "Turn host offload"),
    ("a layer of another pool", put(MAPPING, (1, 0), 1), "layer 1 of pool 1"),
    ("a layer that is none", put(MAPPING, (1, 1), 4), "layer 4 of pool 0"),
    ("two layers in one place", put(MAPPING, (1, 1), 0), "a place of its own"),
    ("a negative span", put("host_spans", (0, 1), -1), "has -1 tokens"),
    ("a span before its sequence", put("host_spans", (0, 0), -1), "begins at -1"),
    ("a span past the RoPE table", put("host_spans", (0, 0), 60), "positions 0 to 63"),
    ("a span past the blocks", put("host_spans", (0, 0), 16), "its table has"),
    (
        "more tokens than allowed",
        lambda case: case.fields["max_num_tokens"].fill(12),
        "at most 12 in one call",
    ),
)


@pytest.mark.parametrize(
    ("change", "sentence"), [pytest.param(*rest, id=title) for title, *rest in REFUSED]
)
def test_lean_registry_enqueue_refuses(
    lean_registry: Registry,
    capfd: pytest.CaptureFixture[str],
    change: Callable[[PluginCase], None],
    sentence: str,
) -> None:
    paged = paged_case(BASE)
    change(paged)
    before = raw(paged.built.target_memory)
    assert run(lean_registry, paged)[0] != 0
    assert sentence in capfd.readouterr().err
    assert torch.equal(raw(paged.built.target_memory), before)
    assert paged.output.tolist() == [UNTOUCHED]
    assert bool((paged.workspace == 0xA5).all()), "a refused call wrote to the workspace"


def test_lean_registry_enqueue_refuses_a_block_written_twice(
    lean_registry: Registry, capfd: pytest.CaptureFixture[str]
) -> None:
    case = begun_at(replace(BASE, num_tokens=29), 3)
    paged = paged_case(case, splits=(6,))  # in the middle of a block of the target
    assert run(lean_registry, paged)[0] != 0
    assert "of the target is named twice" in capfd.readouterr().err


@pytest.mark.parametrize("missing", ["packed_map", "host_spans", "source_kv_cache_block_offsets"])
def test_lean_registry_enqueue_refuses_null_addresses(
    lean_registry: Registry, capfd: pytest.CaptureFixture[str], missing: str
) -> None:
    paged = paged_case(BASE)
    plugin = lean_registry.create(paged.fields)
    assert plugin is not None
    paged.give_workspace(plugin.workspace_size(paged.tensors))
    inputs = paged.addresses()
    inputs[list(paged.arrays).index(missing)] = 0
    workspace, output = paged.workspace.ctypes.data, paged.output.ctypes.data
    assert plugin.enqueue(paged.tensors, inputs, output, workspace) != 0
    assert f"Input {missing} has no address" in capfd.readouterr().err
    assert plugin.enqueue(paged.tensors, paged.addresses(), 0, workspace) != 0
    assert plugin.enqueue(paged.tensors, paged.addresses(), output, 0) != 0
    assert plugin.enqueue(paged.tensors, paged.addresses(), output, workspace + 4) != 0
    assert paged.output.tolist() == [UNTOUCHED]


def test_lean_registry_enqueue_refuses_tables_that_differ(
    lean_registry: Registry, capfd: pytest.CaptureFixture[str]
) -> None:
    paged = paged_case(BASE)
    paged.arrays["source_kv_cache_block_offsets"] = np.zeros((1, 2, 2, 3), np.int32)
    assert run(lean_registry, paged)[0] != 0
    assert "One table, and one span for each sequence" in capfd.readouterr().err


def test_lean_registry_enqueue_refuses_too_few_token_ids(
    lean_registry: Registry, capfd: pytest.CaptureFixture[str]
) -> None:
    paged = paged_case(BY_ID["slice-with-own-layer-0"])
    paged.arrays["token_ids"] = paged.arrays["token_ids"][:-1].copy()
    assert run(lean_registry, paged)[0] != 0
    assert "an id for each token" in capfd.readouterr().err


def test_lean_registry_enqueue_refuses_dense_spans_that_do_not_fit(
    lean_registry: Registry, capfd: pytest.CaptureFixture[str]
) -> None:
    sides = {
        name: replace(getattr(BASE, name), tokens_per_block=16, shuffled=False)
        for name in ("source", "target")
    }
    dense = dense_case(replace(BASE, **sides))
    before = raw(dense.built.target_memory)
    dense.arrays["host_spans"][0, 1] = 17
    assert run(lean_registry, dense)[0] != 0
    assert "source_kv holds 16 of each sequence" in capfd.readouterr().err
    dense.arrays["host_spans"] = dense.arrays["host_spans"][:-1].copy()
    assert run(lean_registry, dense)[0] != 0
    assert "one for each is needed" in capfd.readouterr().err
    assert torch.equal(raw(dense.built.target_memory), before)
