"""A FAKE of the names of ``tensorrt`` that the engine lane uses.

"Building" a network keeps it as a pickle. "Running" it does what plugins/kvMapPlugin/README.md says
of the paged mode, on addresses of CPU memory, with the map's plain formula. Numbers are float32
whatever type the network declares.
"""

from __future__ import annotations

import ctypes
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fake_engine_world import WORLD

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.mapper.backends import map_kv
from trtllm_kvmap.mapper.contract import Span
from trtllm_kvmap.mapper.pool import KvPool

__version__ = "10.14.1.48"
int32, int64, float32 = "int32", "int64", "float32"


class Logger:
    WARNING = 2

    def __init__(self, min_severity=WARNING): ...


class NetworkDefinitionCreationFlag:
    STRONGLY_TYPED = 1


class PluginFieldType:
    INT32, INT64, FLOAT32 = "int32", "int64", "float32"


class TensorRTPhase:
    BUILD = 0


class ITensor:
    name = ""

    def __init__(self, name, content):
        self.name, self._content = name, content


class ILayer:
    def __init__(self, content):
        self._output = ITensor("", content)

    def get_output(self, index):
        assert index == 0
        return self._output


class PluginField:
    def __init__(self, name, data, type):
        assert str(data.dtype) == type
        self._entry = name, data.copy()


class PluginFieldCollection(list): ...


class IPluginCreatorV3One:
    def create_plugin(self, name, field_collection, phase):
        assert (name, phase) == ("KvMap", TensorRTPhase.BUILD)
        return dict(entry._entry for entry in field_collection)


class IPluginRegistry:
    def load_library(self, plugin_path):
        WORLD.libraries.append(plugin_path)

    def get_creator(self, type, version, plugin_namespace):
        known = (type, version, plugin_namespace) == ("KvMap", "1", "trtllm_kvmap")
        return IPluginCreatorV3One() if WORLD.libraries and known else None


def get_plugin_registry():
    return IPluginRegistry()


class INetworkDefinition:
    def __init__(self):
        self._inputs, self._layers, self._outputs = {}, [], []

    def add_input(self, name, dtype, shape):
        self._inputs[name] = dtype, tuple(shape)
        return ITensor(name, ("input", name))

    def add_constant(self, shape, weights):
        assert weights.shape == shape
        return ILayer(("constant", np.array(weights)))

    def add_plugin_v3(self, inputs, shape_inputs, plugin):
        assert shape_inputs == []
        layer = ILayer(("plugin", plugin, [tensor._content for tensor in inputs]))
        self._layers.append(layer)
        return layer

    def mark_output(self, tensor):
        self._outputs.append(tensor)


class IOptimizationProfile:
    def __init__(self):
        self._shapes = {}

    def set_shape(self, input, min, opt, max):
        self._shapes[input] = tuple(min), tuple(max)


class IBuilderConfig:
    def __init__(self):
        self._profiles = []

    def add_optimization_profile(self, profile):
        self._profiles.append(profile)


class Builder:
    def __init__(self, logger): ...

    def create_network(self, flags):
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return INetworkDefinition()

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        (output,), (profile,) = network._outputs, config._profiles
        dynamic = {name for name, (_, shape) in network._inputs.items() if -1 in shape}
        assert dynamic == set(profile._shapes), "every dynamic input needs its range, and no other"
        return pickle.dumps((output.name, output._content, network._inputs, profile._shapes))


class Runtime:
    def __init__(self, logger): ...

    def deserialize_cuda_engine(self, serialized_engine):
        assert WORLD.libraries, "the plugin's library is loaded before an engine that uses it"
        return ICudaEngine(pickle.loads(serialized_engine))


class ICudaEngine:
    def __init__(self, content):
        self._content = content

    def create_execution_context(self):
        return IExecutionContext(*self._content)


class IExecutionContext:
    def __init__(self, output, content, inputs, shapes):
        (_, self._fields, self._order), self._output = content, output
        self._inputs, self._shapes = inputs, shapes
        self._given, self._addresses = {}, {}
        blob = next(what for kind, what in self._order if kind == "constant")
        self._kvmap = unpack(blob)

    def set_input_shape(self, name, shape):
        (least,), (most,) = self._shapes[name]
        assert least <= shape[0] <= most
        self._given[name] = shape
        return True

    def set_tensor_address(self, name, memory):
        assert memory, f"{name} has no address"
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle):
        assert set(self._addresses) == {*self._inputs, self._output}
        at = SimpleNamespace(**{name: self._read(name) for name in self._inputs})
        first, count = at.host_spans[0].tolist()
        sides = {}
        for side in ("source", "target"):
            pool = self._pool(side, at)
            table = self._table(side, at, pool.shape[1])
            assert pool.shape[0] == at.host_num_blocks[("source", "target").index(side)]
            size = pool.shape[4]
            positions = torch.arange(first, first + count)
            blocks = torch.from_numpy(table)[positions // size]
            sides[side] = (
                KvPool.from_trtllm(pool),
                torch.where(blocks < 0, -1, blocks * size + positions % size),
            )
        (source, source_slots), (target, target_slots) = sides["source"], sides["target"]
        ids = getattr(at, "token_ids", None)
        span = Span(
            source_slots,
            target_slots,
            torch.arange(first, first + count),
            None if ids is None else torch.from_numpy(ids).long(),
            first + count,
            first + count,
        )
        map_kv(self._kvmap, source, target, span)
        mapped = int(((source_slots >= 0) & (target_slots >= 0)).sum())
        ctypes.cast(self._addresses[self._output], ctypes.POINTER(ctypes.c_int32))[0] = mapped
        return True

    def _read(self, name: str) -> np.ndarray:
        dtype, shape = self._inputs[name]
        shape = self._given[name] if -1 in shape else shape
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = ctypes.string_at(self._addresses[name], size)
        return np.frombuffer(bytearray(memory), dtype).reshape(shape)

    def _pool(self, side: str, at: Any) -> torch.Tensor:
        pointers = getattr(at, f"host_{side}_kv_cache_pool_pointers")
        mapping = getattr(at, f"host_{side}_kv_cache_pool_mapping")
        pool = WORLD.pools[int(pointers[0, 0])]
        assert mapping.tolist() == [[0, layer] for layer in range(pool.shape[1])]
        return pool

    def _table(self, side: str, at: Any, num_layers: int) -> np.ndarray:
        """int64 [blocks]: the block ids behind the offsets."""
        on_host = getattr(at, f"host_{side}_kv_cache_block_offsets")
        assert np.array_equal(on_host, getattr(at, f"{side}_kv_cache_block_offsets"))
        keys, values = on_host[0, 0].astype(np.int64)
        assert np.array_equal(np.where(keys < 0, -1, keys + 1), values)
        assert (keys[keys >= 0] % (2 * num_layers) == 0).all()
        return np.where(keys < 0, -1, keys // (2 * num_layers))


def pack(kvmap: KvMap) -> torch.Tensor:
    """A stand-in for a packed map: the map's own file, uint8 [whole int32s]."""
    with tempfile.TemporaryDirectory() as folder:
        kvmap.save(Path(folder) / "map")
        content = (Path(folder) / "map").read_bytes()
    content = len(content).to_bytes(8, "little") + content
    return torch.frombuffer(bytearray(content + bytes(-len(content) % 4)), dtype=torch.uint8)


def unpack(blob: np.ndarray) -> KvMap:
    content = blob.tobytes()
    size = int.from_bytes(content[:8], "little")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "map").write_bytes(content[8 : 8 + size])
        return KvMap.load(Path(folder) / "map", allow_unproven=True)
