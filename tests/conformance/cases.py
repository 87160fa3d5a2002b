"""The one table of cases that every backend of ``map_kv`` is driven by.

A case is data: two model specs, how the map reads, how the pools are stored, which tokens go where.
``case_build.py`` makes tensors of it, ``expected.py`` the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams


@dataclass(frozen=True)
class Side:
    """One model's cache. ``storage`` is one of:

    ``trtllm``  [num_blocks, num_layers, 2, num_kv_heads, tokens_per_block, head_dim], contiguous
    ``dense``   per layer [1, num_kv_heads, tokens, head_dim]: one block holds the whole sequence
    ``odd``     tokens before layers before heads, with unused gaps after each of them

    Tokens in ``skipped`` have slot -1. ``length`` is the sequence length the keys were written at
    (None: where the span ends).
    """

    layers: int
    heads: int
    head_dim: int
    rope: RopeParams
    storage: str = "trtllm"
    tokens_per_block: int = 8
    dtype: str = "float32"
    key_scale: float = 1.0
    value_scale: float = 1.0
    shuffled: bool = True
    skipped: tuple[int, ...] = ()
    length: int | None = None

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            name="case",
            architecture="llama",
            num_layers=self.layers,
            num_heads=2 * self.heads,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            vocab_size=VOCABULARY,
            max_positions=MAX_POSITIONS,
            rope=self.rope,
        )


@dataclass(frozen=True)
class Case:
    """``scope`` says which slices each target head reads (see case_build.py).

    ``first_slot_offset`` tokens of the first block on both sides lie before the span, so that the
    first and the last block are both partial. ``verbatim``: the numbers must arrive bit by bit.
    ``second``: what stands beside the matrices (see case_build.py).
    """

    id: str
    source: Side
    target: Side
    scope: str = "slice"
    num_tokens: int = 13
    positions: tuple[int, ...] = ()
    first_position: int = 0
    first_slot_offset: int = 0
    verbatim: bool = False
    second: str = ""


VOCABULARY = 19
MAX_POSITIONS = 8192

PLAIN = RopeParams(theta=10000.0, rotary_dim=32)
WIDE = RopeParams(theta=500000.0, rotary_dim=64)
SOURCE = Side(layers=3, heads=2, head_dim=32, rope=PLAIN)
TARGET = Side(layers=4, heads=3, head_dim=64, rope=WIDE, tokens_per_block=4)
BASE = Case("plain", SOURCE, TARGET)

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"kind": "linear", "factor": 4.0},
    "dynamic": {"kind": "dynamic", "factor": 2.0, "original_length": 16},
    "yarn": {
        "kind": "yarn",
        "factor": 8.0,
        "original_length": 32,
        "attention_factor": 1.2079441541679836,
    },
    "llama3": {"kind": "llama3", "factor": 8.0, "original_length": 64, "high_freq_factor": 4.0},
    "longrope": {"kind": "longrope", "original_length": 24, "attention_factor": 1.19},
    "partial": {"rotary": 0.5},
    "interleaved": {"interleaved": True},
    "partial-interleaved-scaled": {"rotary": 0.5, "interleaved": True, "attention_factor": 0.7},
    "none": {"rotary": 0.0},
}


def rope(name: str, side: Side) -> RopeParams:
    options = dict(ROPES[name])
    rotary_dim = int(side.head_dim * options.pop("rotary", 1.0))
    if options.get("kind") == "longrope":
        half = rotary_dim // 2
        options["short_factor"] = tuple(1.0 + 0.01 * i for i in range(half))
        options["long_factor"] = tuple(1.0 + 0.25 * i for i in range(half))
    return RopeParams(theta=side.rope.theta, rotary_dim=rotary_dim, **options)


def _with(
    case_id: str,
    *,
    source: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    **changes: Any,
) -> Case:
    return replace(
        BASE,
        id=case_id,
        source=replace(SOURCE, **(source or {})),
        target=replace(TARGET, **(target or {})),
        **changes,
    )


def _scales(dtype: str, key_scale: float, value_scale: float) -> dict[str, float]:
    return {"key_scale": key_scale, "value_scale": value_scale} if "float8" in dtype else {}


def _like_target(**changes: Any) -> dict[str, Any]:
    """A source of the target's own geometry, for copies."""
    return {"layers": 3, "heads": 3, "head_dim": 64, "rope": WIDE, **changes}


PAGES = [
    BASE,
    _with("one-token", num_tokens=1),
    _with("empty-span", num_tokens=0),
    _with("all-skipped", num_tokens=3, source={"skipped": (0, 2)}, target={"skipped": (1,)}),
    _with("last-block-partial", num_tokens=9, first_slot_offset=3),
    _with("blocks-16-to-64", source={"tokens_per_block": 16}, target={"tokens_per_block": 64}),
    _with("blocks-64-to-1", source={"tokens_per_block": 64}, target={"tokens_per_block": 1}),
    _with("blocks-in-order", source={"shuffled": False}, target={"shuffled": False}),
    _with("skip-in-source", source={"skipped": (4, 5)}),
    _with("skip-in-target", target={"skipped": (0, 7, 12)}),
    _with("skip-in-both", source={"skipped": (0, 4)}, target={"skipped": (4, 6)}),
    _with("far-positions", first_position=4000),
    _with("positions-in-any-order", num_tokens=5, positions=(7, 3, 3, 900, 0)),
    _with("long-span-in-blocks", num_tokens=530, target={"layers": 2}, first_slot_offset=5),
    _with(
        "long-span-dense",
        num_tokens=530,
        scope="slice-own",
        source={"storage": "dense"},
        target={"layers": 2, "storage": "dense", "skipped": (511, 512, 513)},
    ),
    _with(  # in the target, offset 19 of one block is followed by offset 20 of the next
        "a-blocks-length-skipped",
        num_tokens=200,
        source={"storage": "dense"},
        target={"layers": 2, "tokens_per_block": 64, "skipped": tuple(range(20, 84))},
    ),
    _with(
        "long-runs-of-64",
        num_tokens=200,
        source={"tokens_per_block": 64},
        target={"layers": 2, "tokens_per_block": 128},
        first_slot_offset=7,
    ),
]
STORAGES = [
    _with(f"{a}-to-{b}", source={"storage": a}, target={"storage": b}, first_slot_offset=2)
    for a in ("trtllm", "dense", "odd")
    for b in ("trtllm", "dense", "odd")
    if (a, b) != ("trtllm", "trtllm")
]
GEOMETRIES = [
    _with("fewer-target-layers", source={"layers": 5}, target={"layers": 2}),
    _with("fewer-target-heads", source={"heads": 4}, target={"heads": 1}),
    _with(
        "head-dim-96-to-32",
        source={"head_dim": 96, "rope": replace(PLAIN, rotary_dim=96)},
        target={"head_dim": 32, "rope": replace(WIDE, rotary_dim=32)},
    ),
    _with(
        "head-dim-64-to-128",
        source={"head_dim": 64, "rope": replace(PLAIN, rotary_dim=64)},
        target={"head_dim": 128, "rope": replace(WIDE, rotary_dim=128), "heads": 2},
    ),
]
SCOPES = [
    _with("pooled-top-2", scope="pooled"),
    _with("pooled-all-layers", scope="pooled-all"),
    _with("head", scope="head", target={"heads": 2}),
    _with("slice-keys-and-values", scope="slice-mixed"),
    _with("pooled-keys-and-values", scope="pooled-mixed"),
    _with("slice-with-own-layer-0", scope="slice-own"),
    _with("pooled-with-own-layer-0", scope="pooled-own"),
    _with("own-layer-0-and-skips", scope="slice-own", source={"skipped": (0, 3)}),
    _with("slice-named-twice", scope="slice-twice"),
    _with("copy", scope="copy", source=_like_target(), verbatim=True),
    _with("copy-turned", scope="copy", source=_like_target(rope=replace(WIDE, theta=1e4))),
    _with("copy-to-bfloat16", scope="copy", source=_like_target(), target={"dtype": "bfloat16"}),
    _with(
        "copy-bfloat16",
        scope="copy",
        source=_like_target(dtype="bfloat16"),
        target={"dtype": "bfloat16"},
        verbatim=True,
    ),
    _with(
        "copy-float8",
        scope="copy",
        source=_like_target(dtype="float8_e4m3fn", key_scale=0.03, value_scale=0.04),
        target={"dtype": "float8_e4m3fn", "key_scale": 0.03, "value_scale": 0.04},
        verbatim=True,
    ),
    _with(
        "copy-float8-rescaled",
        scope="copy",
        source=_like_target(dtype="float8_e4m3fn", key_scale=0.03, value_scale=0.04),
        target={"dtype": "float8_e4m3fn", "key_scale": 0.05, "value_scale": 0.04},
    ),
    _with(
        "copy-across-a-regime",
        scope="copy",
        num_tokens=5,
        source=_like_target(
            rope=RopeParams(kind="dynamic", factor=2.0, original_length=16, rotary_dim=64),
            length=40,
        ),
        target={
            "rope": RopeParams(kind="dynamic", factor=2.0, original_length=16, rotary_dim=64),
            "length": 12,
        },
    ),
    _with("copies-of-other-fields", scope="copy-crossed", source=_like_target()),
    _with("copies-and-slices", scope="blend", source=_like_target()),
]
DTYPES = [
    _with(
        f"{a}-to-{b}",
        source={"dtype": a, **_scales(a, 0.02, 0.05)},
        target={"dtype": b, **_scales(b, 0.04, 0.01)},
    )
    for a, b in (
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float16"),
        ("float32", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e4m3fn", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
    )
]
DTYPES.append(
    _with(
        "float8-saturates",
        target={"dtype": "float8_e4m3fn", "key_scale": 2e-3, "value_scale": 2e-3},
    )
)
ROPE_CASES = [
    _with(f"rope-{name}-{side}", first_position=30, **{side: {"rope": rope(name, base)}})
    for name in ROPES
    for side, base in (("source", SOURCE), ("target", TARGET))
]

SHORT_ROPE_CASES = [  # below the length at which these kinds change their frequencies
    _with(f"rope-{name}-short-{side}", **{side: {"rope": rope(name, base)}})
    for name in ("dynamic", "longrope")
    for side, base in (("source", SOURCE), ("target", TARGET))
]

# Not among CASES: a kernel sees a linear second term and a matrix as one matrix, and computes no
# other. Weights in float8_e4m3fn it does compute: tests/cpp runs those on every variant.
SECONDS = (
    _with("low-rank", second="low-rank"),
    _with("low-rank-pooled", scope="pooled", second="low-rank"),
    _with("linear-residual", scope="slice-mixed", second="residual"),
    _with("silu-residual", second="silu"),
    _with("silu-residual-pooled-own", scope="pooled-own", second="silu", num_tokens=530),
    _with("silu-alone", scope="slice-twice", second="silu-alone", target={"dtype": "bfloat16"}),
    _with("silu-beside-copies", scope="blend", second="silu", source=_like_target()),
    _with("float8-weights", second="float8"),
    _with("float8-weights-pooled", scope="pooled", second="float8"),
)
CASES = (
    *PAGES,
    *STORAGES,
    *GEOMETRIES,
    *SCOPES,
    *DTYPES,
    *ROPE_CASES,
    *SHORT_ROPE_CASES,
)
