"""The structs of mapKvCache.h as ctypes sees them."""

from __future__ import annotations

import ctypes as c

MAX_LAYERS = 128
FLOAT32, FLOAT16, BFLOAT16, FLOAT8 = range(4)
AUTO, WIDE, NARROW, SMALL_T, HOPPER = range(5)


class Status(c.Structure):
    _fields_ = [("code", c.c_int32), ("sentence", c.c_char * 256)]


class ModelShape(c.Structure):
    _fields_ = [
        (name, c.c_int32)
        for name in ("num_layers", "num_kv_heads", "head_dim", "rotary_dim", "interleaved")
    ]


class Slice(c.Structure):
    _fields_ = [(name, c.c_int32) for name in ("origin", "field", "layer", "head")]


class MapGroupSpec(c.Structure):
    _fields_ = [
        *((name, c.c_int32) for name in ("field", "layer", "num_heads", "num_slices")),
        ("heads", c.POINTER(c.c_int32)),
        ("slices", c.POINTER(Slice)),
        ("weight", c.c_void_p),
        ("bias", c.c_void_p),
        ("scale", c.c_void_p),
    ]


class MapSpec(c.Structure):
    _fields_ = [
        ("source", ModelShape),
        ("target", ModelShape),
        ("compute_type", c.c_int32),
        ("weight_type", c.c_int32),
        ("num_groups", c.c_int32),
        ("groups", c.POINTER(MapGroupSpec)),
    ]


class PackedMap(c.Structure):
    _fields_ = [
        ("version", c.c_int32),
        ("compute_type", c.c_int32),
        ("weight_type", c.c_int32),
        ("source", ModelShape),
        ("target", ModelShape),
        *(
            (name, c.c_int32)
            for name in (
                "num_groups",
                "num_copies",
                "num_slices",
                "num_source_slices",
                "num_wide_tiles",
                "num_narrow_tiles",
                "max_k_blocks",
                "reads_token_ids",
            )
        ),
        *(
            (name, c.c_int64)
            for name in (
                "groups",
                "copies",
                "slices",
                "slice_lists",
                "head_lists",
                "wide_tiles",
                "narrow_tiles",
                "bias",
                "scales",
                "weights",
                "bytes",
            )
        ),
        ("blob", c.c_void_p),
    ]


class PoolView(c.Structure):
    _fields_ = [
        ("layers", c.c_void_p * MAX_LAYERS * 2),
        *(
            (name, c.c_int64)
            for name in ("block_stride", "head_stride", "token_stride", "channel_stride")
        ),
        *(
            (name, c.c_int32)
            for name in (
                "num_blocks",
                "num_layers",
                "num_kv_heads",
                "tokens_per_block",
                "head_dim",
                "dtype",
            )
        ),
        ("scale", c.c_float * 2),
    ]


class Span(c.Structure):
    _fields_ = [
        ("source_slots", c.c_void_p),
        ("target_slots", c.c_void_p),
        ("positions", c.c_void_p),
        ("token_ids", c.c_void_p),
        ("num_tokens", c.c_int64),
        ("index_type", c.c_int32),
    ]


class RopeTable(c.Structure):
    _fields_ = [
        ("cos", c.c_void_p),
        ("sin", c.c_void_p),
        ("num_positions", c.c_int64),
        ("scale", c.c_float),
    ]


class TokenTable(c.Structure):
    _fields_ = [
        ("fields", c.c_void_p * 2),
        ("vocab_size", c.c_int64),
        ("dtype", c.c_int32),
    ]


class MapParams(c.Structure):
    _fields_ = [
        ("map", PackedMap),
        ("source", PoolView),
        ("target", PoolView),
        ("span", Span),
        ("source_rope", RopeTable),
        ("target_rope", RopeTable),
        ("token_table", TokenTable),
        ("same_rotation", c.c_int32),
        ("variant", c.c_int32),
        ("chunk_tokens", c.c_int32),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_size_t),
    ]


SIZED = (Status, MapSpec, MapGroupSpec, PackedMap, PoolView, Span, TokenTable, MapParams)
