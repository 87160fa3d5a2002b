"""The KvMap plugin through the real registry: made, asked, serialised, cloned, and refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import BASE, CASES
from harness import (
    BF16,
    CHW32,
    FLOAT,
    HALF,
    INT32,
    INT64,
    RUNTIME,
    Libraries,
    Plugin,
    Registry,
    Tensor,
)
from plugin_case import DENSE, PluginCase, dense_case, paged_case

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "plugins" / "kvMapPlugin" / "README.md"
CONFIG = ROOT / "plugins" / "kvMapPlugin" / "KvMap_PluginConfig.yaml"
OWN = next(case for case in CASES if case.id == "slice-with-own-layer-0")
IN_ORDER = replace(BASE.target, tokens_per_block=16, shuffled=False)
DENSE_CASE = replace(
    BASE,
    source=replace(BASE.source, tokens_per_block=16, shuffled=False),
    target=IN_ORDER,
)

Fields = dict[str, np.ndarray]


@pytest.fixture
def paged() -> PluginCase:
    return paged_case(BASE)


@pytest.fixture
def dense() -> PluginCase:
    return dense_case(DENSE_CASE)


def made(registry: Registry, case: PluginCase) -> Plugin:
    plugin = registry.create(case.fields)
    assert plugin is not None
    return plugin


def test_lean_registry_lists_the_creator(lean_registry: Registry) -> None:
    assert lean_registry.version // 10000 == lean_registry.library.headerMajor()
    assert lean_registry.creator()
    assert not lean_registry.creator(version="2")
    assert not lean_registry.creator(name="KvMapOther")


def test_lean_registry_creator_names_the_documented_fields(
    lean_registry: Registry, paged: PluginCase
) -> None:
    names = list(lean_registry.creator_fields())
    assert sorted(names) == sorted(paged.fields)
    text = README.read_text()
    documented = re.findall(r"^\| `(\w+)` \| `(?:int32|int64|float32)\[", text, re.MULTILINE)
    assert documented == names
    for name in names:
        assert re.search(rf"^ +- {name}$", CONFIG.read_text(), re.MULTILINE), name


def test_lean_registry_makes_a_plugin_of_three_capabilities(
    lean_registry: Registry, paged: PluginCase
) -> None:
    plugin = made(lean_registry, paged)
    core, build, runtime = plugin.description.split("; ")[1:]
    assert plugin.description.startswith("KvMap/1/trtllm_kvmap; ")
    assert core == "PLUGIN_V3ONE_CORE v1.0"
    assert build == "PLUGIN_V3ONE_BUILD v2.0"
    assert runtime == "PLUGIN_V3ONE_RUNTIME v1.0"
    assert plugin.num_outputs == 1
    assert plugin.aliased_input == -1


def changed(name: str, *values: float) -> Callable[[Fields], Fields]:
    return lambda fields: {**fields, name: np.array(values, fields[name].dtype)}


def with_packed(index: int, value: int) -> Callable[[Fields], Fields]:
    def change(fields: Fields) -> Fields:
        ints = fields["packed_map"].copy()
        ints[index] = value
        return {**fields, "packed_map": ints}

    return change


REFUSED_FIELDS: tuple[tuple[str, Callable[[Fields], Fields], str], ...] = (
    ("none", lambda f: {}, "Field fields_version is missing"),
    ("one missing", lambda f: {k: v for k, v in f.items() if k != "mode"}, "Field mode is missing"),
    ("one unknown", lambda f: {**f, "speed": np.int32([1])}, "There is no field speed"),
    ("another version", changed("fields_version", 2), "version 2; this plugin reads version 1"),
    ("another packed map", with_packed(0, 99), "packed_map is of version 99"),
    ("a packed map cut short", lambda f: {**f, "packed_map": f["packed_map"][:-1]}, "length 31"),
    ("a packed map of 0 layers", with_packed(3, 0), "source of 0 layers"),
    ("a packed map of too many layers", with_packed(8, 129), "target of 129 layers"),
    ("another type", lambda f: {**f, "mode": np.float32([0])}, "Field mode is of type 1"),
    ("another mode", changed("mode", 2), "mode is 2"),
    ("another cache dtype", changed("cache_dtypes", 0, 4), "cache_dtypes of the target is 4"),
    ("blocks of 12", changed("tokens_per_block", 12, 4), "source is 12; a power of two"),
    ("blocks of 0", changed("tokens_per_block", 8, 0), "target is 0; a power of two"),
    ("a scale of 0", changed("cache_scales", 1, 1, 0, 1), "A scale is 0"),
    ("a scale of NaN", changed("rope_scales", 1, float("nan")), "A scale is nan"),
    ("no tokens", changed("max_num_tokens", 0), "max_num_tokens is 0"),
    ("chunks below 0", changed("chunk_tokens", -1), "chunk_tokens -1"),
    ("another variant", changed("variant", 9), "variant is 9"),
)


@pytest.mark.parametrize(
    ("change", "sentence"), [pytest.param(*rest, id=title) for title, *rest in REFUSED_FIELDS]
)
def test_lean_registry_creator_refuses(
    lean_registry: Registry,
    paged: PluginCase,
    capfd: pytest.CaptureFixture[str],
    change: Callable[[Fields], Fields],
    sentence: str,
) -> None:
    assert lean_registry.create(change(paged.fields), RUNTIME) is None
    assert sentence in capfd.readouterr().err


def test_lean_registry_plugin_infers_types_and_shapes(
    lean_registry: Registry, paged: PluginCase, dense: PluginCase
) -> None:
    plugin, tensors = made(lean_registry, paged), paged.tensors
    assert plugin.output_type(tensors) == INT32
    assert plugin.output_shape(tensors) == ["1"]
    tensors[3] = Tensor.of(INT32, -1, 2)
    assert plugin.output_shape(tensors) == ["3.0"]
    assert plugin.output_shape(tensors[1:]) is None

    plugin, tensors = made(lean_registry, dense), dense.tensors
    assert plugin.output_type(tensors) == FLOAT
    tensors[4] = Tensor.of(FLOAT, -1, 3, 2, 2, -1, 32)
    assert plugin.output_shape(tensors) == ["4.0", "4", "2", "3", "4.4", "64"]


@pytest.mark.parametrize("name", ["paged", "dense", "own"])
def test_lean_registry_plugin_takes_one_type_and_linear_only(
    lean_registry: Registry, name: str, paged: PluginCase, dense: PluginCase
) -> None:
    case = {"paged": paged, "dense": dense, "own": paged_case(OWN)}[name]
    plugin, tensors = made(lean_registry, case), case.tensors
    tables = [i for i, input_ in enumerate(case.arrays) if input_.startswith("token_table")]
    for position, tensor in enumerate(tensors):
        assert plugin.supports(position, tensors)
        for other in (FLOAT, HALF, BF16, INT32, INT64):
            good = other == tensor.type or (position in tables and other in (HALF, BF16))
            given = [*tensors]
            given[position] = Tensor.of(other, *tensor.dims[: tensor.rank])
            assert plugin.supports(position, given) == good, (position, other)
        given = [*tensors]
        given[position] = Tensor.of(tensor.type, *tensor.dims[: tensor.rank], format_=CHW32)
        assert not plugin.supports(position, given)


@pytest.mark.parametrize("name", ["paged", "dense", "own"])
def test_lean_registry_plugin_refuses_every_wrong_shape(
    lean_registry: Registry,
    capfd: pytest.CaptureFixture[str],
    name: str,
    paged: PluginCase,
    dense: PluginCase,
) -> None:
    """Each input once with a rank too few, and once for each fixed dimension that is off by one."""
    case = {"paged": paged, "dense": dense, "own": paged_case(OWN)}[name]
    plugin, tensors = made(lean_registry, case), case.tensors
    assert plugin.configure(tensors) == 0
    assert plugin.change_shape(tensors) == 0
    names = list(case.arrays)
    free = {
        "source_rope": (1,),
        "target_rope": (1,),
        "host_spans": (0,),
        "source_kv": (0, 4),
        "token_ids": (0,),
        "token_table_keys": (0,),
        "token_table_values": (0,),
    }
    free |= {name: (1, 3) for name in names if name.endswith("block_offsets")}
    for position, input_ in enumerate(names):
        dims = list(tensors[position].dims[: tensors[position].rank])
        wrong = [dims[:-1]]
        for axis in range(len(dims)):
            other = [*dims]
            other[axis] += 1
            if axis not in free.get(input_, ()):
                wrong.append(other)
            else:
                good = [*tensors]
                good[position] = Tensor.of(tensors[position].type, *other)
                assert plugin.change_shape(good) == 0
        for shape in wrong:
            given = [*tensors]
            given[position] = Tensor.of(tensors[position].type, *shape)
            assert plugin.configure(given) != 0
            assert plugin.change_shape(given) != 0
            assert f"Input {input_} has shape {shape}" in capfd.readouterr().err
    assert plugin.configure(tensors[1:]) != 0
    assert "inputs; this map needs" in capfd.readouterr().err


@pytest.mark.parametrize("most", [1, 64, 5000])
def test_lean_registry_plugin_asks_for_the_largest_workspace(
    lean_registry: Registry, paged: PluginCase, most: int
) -> None:
    paged.fields["max_num_tokens"][:] = most
    needed = torch.ops.trtllm_kvmap.workspace_size
    layout = paged.fields["packed_map"].tolist()
    largest = max(needed(layout, n, 0, 0) for n in [*range(1, min(most, 3000) + 1), most])
    indices = 3 * ((4 * most + 255) // 256 * 256)
    assert made(lean_registry, paged).workspace_size(paged.tensors) == indices + largest


@pytest.mark.parametrize("mode", ["paged", "dense"])
def test_lean_registry_plugin_survives_serialisation(
    lean_registry: Registry, mode: str, paged: PluginCase, dense: PluginCase
) -> None:
    case = paged if mode == "paged" else dense
    first = made(lean_registry, case)
    kept = first.serialised()
    assert {k: v.tolist() for k, v in kept.items()} == {
        k: v.tolist() for k, v in case.fields.items()
    }
    second = lean_registry.create(kept, RUNTIME)
    assert second is not None
    copies = [second.clone(), second.attach()]
    del first, second
    for plugin in copies:  # whole after what they were copied from is gone
        again = plugin.serialised()
        assert all(np.array_equal(again[name], kept[name]) for name in kept)
        assert plugin.configure(case.tensors) == 0
        assert plugin.output_shape(case.tensors) is not None
    for version in (0, 2):
        kept["fields_version"][:] = version
        assert lean_registry.create(kept, RUNTIME) is None


def test_lean_registry_and_real_plugin_refuse_without_a_gpu(
    libraries: Libraries, lean_runtime: Path, tmp_path: Path
) -> None:
    """The plugin as nvcc built it, in a process of its own: found by TensorRT's Python, and an
    enqueue that ends with a sentence where there is no device.
    """
    if libraries.plugin is None:
        pytest.skip("nvcc is not here, so there is no plugin with device code")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here; gpu_acceptance.py runs this plugin on it")
    script = Path(__file__).with_name("real_plugin.py")
    command = [sys.executable, str(script), str(libraries.harness), str(lean_runtime)]
    done = subprocess.run(
        [*command, str(libraries.plugin)], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"TensorRT lean runtime {found['version']}, {lean_runtime}")
    assert "KvMap" in found["creators"]
    assert found["enqueue"] != 0
    assert not found["written"]
    assert "KvMap: CUDA: " in done.stderr


def test_acceptance_enqueues_the_plugin_without_a_runtime(
    libraries: Libraries, tmp_path: Path
) -> None:
    """What gpu_acceptance.py runs on a GPU, here with the plugin whose kernels are emulated."""
    script, out = ROOT / "build_scripts" / "gpu" / "plugin.py", tmp_path / "plugin.json"
    folder = str(libraries.harness.parent)
    command = [sys.executable, str(script), "--library", folder, "--built", folder]
    done = subprocess.run(
        [*command, "--device", "cpu", "--json", str(out)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(out.read_text())
    assert findings["runs"] >= 5
    assert findings["failures"] == {}


def test_dense_is_the_other_mode(dense: PluginCase) -> None:
    assert dense.fields["mode"].tolist() == [DENSE]
