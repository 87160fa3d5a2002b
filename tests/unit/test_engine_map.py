"""What the map engine is made of, held to the plugin's own files and to the native part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from handmade_maps import random_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.engine import map_fields
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.map_fields import map_network
from trtllm_kvmap.engine.ports import CONSTANTS, TABLE, map_ports
from trtllm_kvmap.engine.sizes import MapShape, map_workspace
from trtllm_kvmap.mapper.cuda import PackedMap, pack_map
from trtllm_kvmap.models import load_model

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "kvMapPlugin"
CONFIG = PipelineConfig(max_tokens=256, tokens_per_block=16)


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    file = PLUGIN / "KvMap_PluginConfig.yaml"
    return yaml.safe_load(file.read_text())["versions"]["1"]


@pytest.fixture(scope="module")
def kvmap(model_folder: Callable[..., Path]) -> KvMap:
    source = load_model(model_folder("qwen3", layers=3, kv_heads=2, seed=1))
    target = load_model(model_folder("llama", layers=4, kv_heads=4, head_dim=32, seed=2))
    return random_map(source, target)


def test_the_ports_are_the_plugins_inputs(described: dict[str, Any], kvmap: KvMap) -> None:
    ports = map_ports(kvmap.source, kvmap.target, CONFIG, reads_token_ids=False)
    assert [*CONSTANTS, *(port.name for port in ports)] == described["inputs"]
    (types,) = (entry["combination1"] for entry in described["supported_input_types"])
    for port in ports:
        assert port.dtype == types[port.name]
        assert len(port.shape) == described["input_dims"][port.name]
        assert port.least == port.most == port.shape
    by_name = {port.name: port.shape for port in ports}
    assert by_name["host_source_kv_cache_pool_mapping"] == (3, 2)
    assert by_name["target_kv_cache_block_offsets"] == (1, 1, 2, 16)
    # As the README's table: token_ids, then the target's own table.
    more = map_ports(kvmap.source, kvmap.target, CONFIG, reads_token_ids=True)[len(ports) :]
    assert [(port.name, port.shape, port.most) for port in more] == [("token_ids", (-1,), (256,))]
    order = (PLUGIN / "README.md").read_text()
    assert order.index("`token_ids`") < order.index(f"`{TABLE[0]}`, `{TABLE[1]}`")


def test_the_fields_are_the_plugins(
    described: dict[str, Any], kvmap: KvMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = described["attribute_length"]["packed_map"]
    packed = PackedMap(torch.arange(64, dtype=torch.uint8), list(range(length)))
    monkeypatch.setattr(map_fields, "load_native", lambda: None)
    monkeypatch.setattr(map_fields, "pack_map", lambda kvmap, dtype, device: packed)
    network = map_network(kvmap, CONFIG)
    assert set(network.fields) == set(described["attributes_required"])
    for name, value in network.fields.items():
        assert str(value.dtype) == described["attribute_types"][name], name
        assert value.shape == (described["attribute_length"][name],), name
    fields = {name: value.tolist() for name, value in network.fields.items()}
    assert (fields["fields_version"], fields["mode"], fields["variant"]) == ([1], [0], [0])
    assert fields["cache_dtypes"] == [2, 2]  # bfloat16
    assert fields["tokens_per_block"] == [16, 16]
    assert fields["max_num_tokens"] == [256]
    assert fields["same_rotation"] == [0]  # heads of 16 and of 32
    assert list(network.constants) == list(CONSTANTS)
    assert network.constants["packed_map"].tobytes() == bytes(range(64))
    # cos and sin of position * theta ** (-2 i / dim), Su et al. 2021.
    for side, spec in (("source_rope", kvmap.source), ("target_rope", kvmap.target)):
        pairs = spec.head_dim // 2
        angles = np.outer(np.arange(256), spec.rope.theta ** (-np.arange(pairs) / pairs))
        expected = np.stack([np.cos(angles), np.sin(angles)])
        np.testing.assert_allclose(network.constants[side], expected, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 60, 256, 5000])
def test_the_workspace_is_no_larger_than_said(
    native_operators: Path, kvmap: KvMap, max_tokens: int
) -> None:
    layout = pack_map(kvmap, torch.bfloat16, torch.device("cpu")).layout
    counts = [n for n in (1, 16, 64, 65, 129, 256, 2048, 5000) if n <= max_tokens]
    needed = max(torch.ops.trtllm_kvmap.workspace_size(layout, n, 0, 0) for n in counts)
    said = map_workspace(MapShape.of(kvmap), kvmap.source, kvmap.target, max_tokens)
    assert needed <= said - 3 * 4 * max_tokens  # the plugin's own indices
