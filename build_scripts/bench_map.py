"""How fast the map runs: against the matmul it is made of, and against aither-kvcache (run it
through bench.py handoff).

Everything is timed side by side in one run, turn by turn, so that whatever else the machine does
falls on both; the numbers are medians of the ratios of turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.mapper.backends import make_mapper
from trtllm_kvmap.mapper.contract import Mapper, Span
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.rotary import remove_rope
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.spec.slices import FIELDS, source_slices

ROUNDS = 7


def make_spec(name: str, num_layers: int, num_kv_heads: int, head_dim: int) -> ModelSpec:
    """A model of which only the cache matters."""
    rope = RopeParams(theta=1e6, rotary_dim=head_dim)
    return ModelSpec(
        name=name,
        architecture="qwen2",
        num_layers=num_layers,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=1,
        max_positions=1 << 20,
        rope=rope,
    )


SOURCE = make_spec("0.5b", 24, 2, 64)
TARGET = make_spec("1.5b", 28, 2, 128)


def pooled_map(source: ModelSpec, target: ModelSpec) -> KvMap:
    """A random map in which every target head reads every slice of its field."""
    heads = tuple(range(target.num_kv_heads))
    width = source.num_layers * source.num_kv_heads * source.head_dim
    out = target.num_kv_heads * target.head_dim
    groups = tuple(
        HeadGroup(
            field=field,
            layer=layer,
            heads=heads,
            slices=source_slices(field, source.num_layers, source.num_kv_heads),
            weight=torch.randn(width, out) / width**0.5,
            bias=torch.randn(out),
        )
        for field in FIELDS
        for layer in range(target.num_layers)
    )
    blank = Fingerprint("", "", "")
    return KvMap(source, target, blank, blank, scope="pooled", groups=groups, fitted={})


def dense_pool(spec: ModelSpec, num_tokens: int) -> KvPool:
    """A transformers-like cache of random numbers: one block that holds the whole sequence."""
    shape = spec.num_layers, 1, spec.num_kv_heads, num_tokens, spec.head_dim
    return KvPool(tuple(torch.randn(shape)), tuple(torch.randn(shape)))


def whole_span(num_tokens: int) -> Span:
    tokens = torch.arange(num_tokens)
    return Span(tokens, tokens, tokens, source_length=num_tokens, target_length=num_tokens)


def ratio(one: Callable[[], object], other: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The time of ``one`` over the time of ``other``, each run once before the clock starts."""
    one()
    other()
    return median(_seconds(one) / _seconds(other) for _ in range(rounds))


def map_fraction_of_matmul(
    num_tokens: int = 1024, source: ModelSpec = SOURCE, target: ModelSpec = TARGET
) -> float:
    """The floating-point rate of a pooled map over that of one float32 matmul of its own shape."""
    kvmap = pooled_map(source, target)
    mapper, span = make_mapper(kvmap, "cpu"), whole_span(num_tokens)
    before, after = dense_pool(source, num_tokens), dense_pool(target, num_tokens)
    width = source.num_layers * source.num_kv_heads * source.head_dim
    out = target.num_layers * target.num_kv_heads * target.head_dim
    x, w, y = torch.randn(num_tokens, width), torch.randn(width, out), torch.empty(num_tokens, out)
    # A map is two such products, one for keys and one for values.
    return 2 * ratio(lambda: torch.mm(x, w, out=y), lambda: mapper.map_kv(before, after, span))


def ratio_to_aither(
    num_tokens: int = 1024, source: ModelSpec = SOURCE, target: ModelSpec = TARGET
) -> float | None:
    """aither-kvcache's time over ours for the same pooled map of the same cache; None where it is
    not installed.

    Theirs is timed from flat, already un-rotated float32 arrays to new arrays per layer, without
    reading or writing a cache; ours from the source's pool to the target's, un-rotation included.
    """
    try:
        from aither_kvcache.kvtransfer.geometry import KVGeometry
        from aither_kvcache.kvtransfer.pack import LoadedPack
        from aither_kvcache.kvtransfer.transfer import translate_cache
    except ImportError:
        return None

    def geometry(spec: ModelSpec) -> KVGeometry:
        return KVGeometry(
            model_id=spec.name,
            family="llama",
            n_layers=spec.num_layers,
            n_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            hidden_size=spec.num_heads * spec.head_dim,
            rope_theta=spec.rope.theta,
            rope_type="default",
            rope_scaling_factor=1.0,
            tokenizer_sha256="",
            torch_dtype="float32",
        )

    kvmap = pooled_map(source, target)
    weights = {}
    for group in kvmap.groups:
        name = f"{group.field[0]}.{group.layer}"
        weights[f"{name}.W"], weights[f"{name}.b"] = group.weight.numpy(), group.bias.numpy()
        weights[f"{name}.src"] = range(source.num_layers)
    pack = LoadedPack(None, geometry(source), geometry(target), weights)
    mapper, span = make_mapper(kvmap, "cpu"), whole_span(num_tokens)
    before, after = dense_pool(source, num_tokens), dense_pool(target, num_tokens)
    keys = [remove_rope(view[0], span.positions, source.rope) for view in before.keys]
    flat = [
        torch.cat(views).transpose(0, 1).reshape(num_tokens, -1).numpy()
        for views in (keys, [view[0] for view in before.values])
    ]
    positions = span.positions.numpy()

    def theirs() -> list:
        return translate_cache(*flat, pack, positions)

    _require_equal(theirs(), mapper, before, after, span)
    return ratio(theirs, lambda: mapper.map_kv(before, after, span))


def _require_equal(theirs: list, mapper: Mapper, before: KvPool, after: KvPool, span: Span) -> None:
    """Two programs that give different answers are not to be compared for speed."""
    mapper.map_kv(before, after, span)
    for (key, value), my_key, my_value in zip(theirs, after.keys, after.values, strict=True):
        for one, mine in ((key, my_key), (value, my_value)):
            torch.testing.assert_close(torch.from_numpy(one), mine, rtol=1e-3, atol=1e-3)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
