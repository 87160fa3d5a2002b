"""A KvMap plugin in the hands of Python: the real registry of a TensorRT runtime, and the plugin's
interfaces one by one (pluginHarness.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# TensorRT's numbers.
FLOAT, HALF, INT32, FP8, BF16, INT64 = 0, 1, 3, 6, 7, 8
LINEAR, CHW32 = 0, 5
BUILD, RUNTIME = 0, 1
FIELD_TYPES = {np.dtype("float32"): 1, np.dtype("int32"): 5, np.dtype("int64"): 10}


class Tensor(ctypes.Structure):
    """Type, format and shape of an input or of the output; -1 is a dimension not yet known."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
    )

    @staticmethod
    def of(type_: int, *dims: int, format_: int = LINEAR) -> Tensor:
        return Tensor(type_, format_, len(dims), (ctypes.c_int64 * 8)(*dims))


@dataclass(frozen=True)
class Libraries:
    """What build_native.py built: ``plugin`` is None where there is no nvcc."""

    harness: Path
    emulated: Path
    plugin: Path | None


@dataclass(frozen=True)
class Registry:
    """The registry of the runtime in ``runtime``, with the plugin library loaded into it; or, with
    version 0, what the plugin library itself names, without a runtime.
    """

    library: ctypes.CDLL
    runtime: Path
    version: int

    @staticmethod
    def open(harness: Path, runtime: Path, plugin: Path) -> Registry:
        library, error = _load(harness), ctypes.create_string_buffer(512)
        version = library.openRegistry(str(runtime).encode(), str(plugin).encode(), error, 512)
        if version < 0:
            raise RuntimeError(error.value.decode())
        return Registry(library, runtime, version)

    @staticmethod
    def alone(harness: Path, plugin: Path) -> Registry:
        library, error = _load(harness), ctypes.create_string_buffer(512)
        if library.openAlone(str(plugin).encode(), error, 512) < 0:
            raise RuntimeError(error.value.decode())
        return Registry(library, plugin, 0)

    def creator(self, name: str = "KvMap", version: str = "1") -> int | None:
        return self.library.findCreator(name.encode(), version.encode(), b"trtllm_kvmap")

    def creator_fields(self) -> dict[str, int]:
        """Names of the fields, with their numpy-independent lengths."""
        fields = ctypes.c_void_p(self.library.creatorFields(ctypes.c_void_p(self.creator())))
        count = self.library.fieldCount(fields)
        each = [ctypes.c_void_p(self.library.fieldAt(fields, i)) for i in range(count)]
        return {self.library.fieldName(f).decode(): self.library.fieldLength(f) for f in each}

    def create(self, fields: Mapping[str, np.ndarray], phase: int = BUILD) -> Plugin | None:
        """None when the creator refused."""
        arrays = [np.ascontiguousarray(value) for value in fields.values()]
        count = len(arrays)
        address = self.library.createPlugin(
            ctypes.c_void_p(self.creator()),
            count,
            (ctypes.c_char_p * count)(*(name.encode() for name in fields)),
            (ctypes.c_int32 * count)(*(FIELD_TYPES[a.dtype] for a in arrays)),
            (ctypes.c_int32 * count)(*(a.size for a in arrays)),
            (ctypes.c_void_p * count)(*(a.ctypes.data for a in arrays)),
            phase,
        )
        return Plugin(self.library, address) if address else None


class Plugin:
    """One IPluginV3, destroyed with this object. Tensors are the inputs, then the output."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self._library = library
        self._address = ctypes.c_void_p(address)

    def __del__(self) -> None:
        self._library.destroyPlugin(self._address)

    def clone(self) -> Plugin:
        return Plugin(self._library, self._library.clonePlugin(self._address))

    def attach(self) -> Plugin:
        return Plugin(self._library, self._library.attachPlugin(self._address))

    @property
    def description(self) -> str:
        text = ctypes.create_string_buffer(512)
        self._library.describePlugin(self._address, text, 512)
        return text.value.decode()

    @property
    def num_outputs(self) -> int:
        return self._library.outputCount(self._address)

    @property
    def aliased_input(self) -> int:
        return self._library.aliasedInput(self._address)

    def output_type(self, tensors: Sequence[Tensor]) -> int:
        return self._library.outputType(self._address, *_array(tensors[:-1]))

    def output_shape(self, tensors: Sequence[Tensor]) -> list[str] | None:
        """None when the plugin refused."""
        text = ctypes.create_string_buffer(512)
        refused = self._library.outputShape(self._address, *_array(tensors[:-1]), text, 512)
        return None if refused else text.value.decode().split(", ")

    def supports(self, position: int, tensors: Sequence[Tensor]) -> bool:
        array, count = _array(tensors)
        return bool(self._library.supports(self._address, position, array, count - 1))

    def configure(self, tensors: Sequence[Tensor]) -> int:
        array, count = _array(tensors)
        return self._library.configure(self._address, array, count - 1)

    def change_shape(self, tensors: Sequence[Tensor]) -> int:
        array, count = _array(tensors)
        return self._library.changeShape(self._address, array, count - 1)

    def workspace_size(self, tensors: Sequence[Tensor]) -> int:
        array, count = _array(tensors)
        return self._library.workspaceSize(self._address, array, count - 1)

    def serialised(self) -> dict[str, np.ndarray]:
        """The fields an engine would keep."""
        fields = ctypes.c_void_p(self._library.serialisedFields(self._address))
        result = {}
        for index in range(self._library.fieldCount(fields)):
            field = ctypes.c_void_p(self._library.fieldAt(fields, index))
            kinds = {number: dtype for dtype, number in FIELD_TYPES.items()}
            dtype = kinds[self._library.fieldType(field)]
            size = self._library.fieldLength(field) * dtype.itemsize
            data = ctypes.string_at(self._library.fieldData(field), size)
            result[self._library.fieldName(field).decode()] = np.frombuffer(data, dtype).copy()
        return result

    def enqueue(
        self, tensors: Sequence[Tensor], inputs: Sequence[Any], output: int, workspace: int
    ) -> int:
        """``inputs`` are addresses (0: null), ``output`` and ``workspace`` too."""
        array, count = _array(tensors)
        return self._library.enqueue(
            self._address,
            array,
            count - 1,
            (ctypes.c_void_p * len(inputs))(*inputs),
            ctypes.c_void_p(output),
            ctypes.c_void_p(workspace),
        )


def _load(harness: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(harness))
    for name in (
        "findCreator",
        "creatorFields",
        "fieldAt",
        "fieldData",
        "createPlugin",
        "clonePlugin",
        "attachPlugin",
        "serialisedFields",
    ):
        getattr(library, name).restype = ctypes.c_void_p
    library.fieldName.restype = ctypes.c_char_p
    library.workspaceSize.restype = ctypes.c_uint64
    return library


def _array(tensors: Sequence[Tensor]) -> tuple[ctypes.Array[Tensor], int]:
    return (Tensor * len(tensors))(*tensors), len(tensors)
