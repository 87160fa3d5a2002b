"""Keys and values of a model while it reads, taken from the cache it fills.

A map's keys are by definition cached keys with their rotation taken off, so the cache is where they
are read: after k-norm and bias, whatever the architecture, and without a hook into any layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trtllm_kvmap.artifact.native import SinkEntry, TokenTable
from trtllm_kvmap.errors import NumericsError, UnavailableError
from trtllm_kvmap.models import KnownModel, LoadedModel
from trtllm_kvmap.rotary import remove_rope

HeldCache = DynamicCache  # for those who may not name transformers

# transformers' table of attention functions belongs to the process: one changes it at a time.
ATTENTION_TABLE = threading.Lock()

# Token ids a batch when the token table is made: enough for full speed, small beside the model.
TABLE_BATCH = 2048


@dataclass(frozen=True, slots=True)
class CapturedKv:
    """pre-RoPE keys and values of one document, float32 [num_layers, num_kv_heads, num_tokens,
    head_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor


def capture_kv(loaded: LoadedModel, token_ids: torch.Tensor) -> CapturedKv:
    """One pass over ``token_ids`` (int64 [num_tokens]) from position 0; no logits are computed.

    Raises NumericsError when the model computes NaN or infinity.
    """
    return captured(loaded, read(loaded, token_ids))


def captured(loaded: LoadedModel, cache: DynamicCache) -> CapturedKv:
    """What capture_kv gives, of a cache that read() filled."""
    keys, values = _stacked(cache)
    return without_rope(loaded, keys, values, loaded.rope_length(keys.shape[2]))


def without_rope(
    model: KnownModel, keys: torch.Tensor, values: torch.Tensor, rope_length: int
) -> CapturedKv:
    """What capture_kv gives, of rotated keys and values, [num_layers, num_kv_heads, num_tokens,
    head_dim] from position 0, that ``model`` wrote with the frequencies of ``rope_length``.

    Raises NumericsError for NaN or infinity.
    """
    positions = torch.arange(keys.shape[2], device=keys.device)
    content = remove_rope(keys.float(), positions, model.spec.rope, rope_length)
    kv = CapturedKv(content, values.float())
    _require_finite(model, kv)
    return kv


@torch.no_grad()
def read(
    loaded: LoadedModel, token_ids: torch.Tensor, before_layer: Callable[[], None] | None = None
) -> DynamicCache:
    """The cache of ``token_ids`` (int64 [num_tokens]) from position 0; no logits are computed.
    ``before_layer`` is called in every layer, and may wait.
    """
    cache = DynamicCache() if before_layer is None else _PausingCache(before_layer)
    _run(loaded, token_ids.to(loaded.device)[None], cache)
    return cache


def cache_of(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> DynamicCache:
    """A cache of these rotated keys and values, one [1, num_kv_heads, num_tokens, head_dim] each
    layer; nothing is copied and gradients flow through it.
    """
    cache = DynamicCache()
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(k, v, layer)
    return cache


@dataclass(frozen=True, slots=True)
class Attention:
    """What one layer's attention is given: rotated queries [num_heads, num_tokens, head_dim],
    rotated keys and values [num_kv_heads, num_entries, head_dim], and the factor on the products of
    queries and keys. The queries are those of the last entries.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float

    def grouped(self) -> torch.Tensor:
        """The queries by the KV head they read, [num_kv_heads, queries of the group, head_dim]."""
        return self.queries.reshape(len(self.keys), -1, self.queries.shape[-1])

    def shares(self) -> torch.Tensor:
        """How much of each query's attention each entry gets, float32 [num_kv_heads, queries of the
        group, num_entries].
        """
        num_tokens, num_entries = self.queries.shape[1], self.keys.shape[1]
        scores = self.grouped().float() @ self.keys.float().mT * self.scaling
        last = torch.arange(num_entries - num_tokens, num_entries, device=scores.device)
        later = torch.arange(num_entries, device=scores.device) > last[:, None]
        group = scores.shape[1] // num_tokens
        return scores.masked_fill(later.repeat(group, 1), float("-inf")).softmax(-1)

    def pieces(self, num_queries: int) -> Iterator[Attention]:
        """The same, at most ``num_queries`` of each head at a time: no query reads entries that
        come after it.
        """
        num_tokens = self.queries.shape[1]
        before = self.keys.shape[1] - num_tokens
        for start in range(0, num_tokens, num_queries):
            stop = min(start + num_queries, num_tokens)
            entries = slice(before + stop)
            yield Attention(
                self.queries[:, start:stop],
                self.keys[:, entries],
                self.values[:, entries],
                self.scaling,
            )

    def products(self) -> torch.Tensor:
        """sum q q^T over the queries of a KV head, float64 [num_kv_heads, head_dim, head_dim]."""
        q = self.grouped().double()
        return q.mT @ q


@contextmanager
def attention_given(loaded: LoadedModel) -> Iterator[list[Attention]]:
    """Collects, layer by layer, what attention is given while the block runs ``loaded`` on one
    sequence. Queries are taken where every architecture hands them over, after norm and rotation.
    Blocks of several threads take turns; one inside another would wait for ever.
    """
    given: list[Attention] = []
    model: Any = loaded.model
    own, here = set(model.modules()), threading.get_ident()
    with ATTENTION_TABLE:
        usual, attend = model.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["sdpa"]

        def noted(module: Any, *tensors: torch.Tensor, **more: Any) -> Any:
            # Another thread may run another model, or this one.
            if module in own and threading.get_ident() == here:
                query, key, value = (tensor[0].detach() for tensor in tensors[:3])
                given.append(Attention(query, key, value, more["scaling"]))
            return attend(module, *tensors, **more)

        model.set_attn_implementation("sdpa")  # eager attention is no entry of the table
        ALL_ATTENTION_FUNCTIONS["sdpa"] = noted
        try:
            yield given
        finally:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]  # type: ignore[no-untyped-call]
            if ALL_ATTENTION_FUNCTIONS["sdpa"] is not attend:  # a host's own entry stood there
                ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
            model.set_attn_implementation(usual)


def output_projection(loaded: LoadedModel, layer: int) -> torch.Tensor:
    """Attention's output projection of one layer, float32 [hidden, num_heads * head_dim].

    Raises UnavailableError for an architecture that keeps it under another name.
    """
    model: Any = loaded.model
    try:
        weight: torch.Tensor = model.base_model.layers[layer].self_attn.o_proj.weight
    except AttributeError as error:
        raise UnavailableError(
            f"{loaded.name} has no o_proj in layer {layer} ({error}), by which an error of its "
            f"values would be weighed; calibrate with weighting uniform."
        ) from error
    return weight.detach().float()


def sink_entry(loaded: LoadedModel, token_ids: list[int]) -> SinkEntry:
    """The target's own KV of a token prefix as its cache holds it, float32."""
    keys, values = _stacked(read(loaded, torch.tensor(token_ids)))
    return SinkEntry(tuple(token_ids), keys.float().cpu(), values.float().cpu())


@torch.no_grad()
def token_table(loaded: LoadedModel) -> TokenTable:
    """Layer-0 KV of every token id, float32 [vocab_size, num_kv_heads, head_dim], keys pre-RoPE.

    Every id is read as a sequence of one token, and the pass ends as soon as layer 0 has its keys
    and values: nothing later is computed.
    """
    keys, values = [], []
    positions = torch.zeros(1, dtype=torch.int64, device=loaded.device)
    every_id = torch.arange(loaded.spec.vocab_size, device=loaded.device)
    for ids in torch.split(every_id, TABLE_BATCH):
        try:
            _run(loaded, ids[:, None], _FirstLayerCache())
        except _FirstLayerError as reached:
            x = reached.keys.float()
            keys.append(remove_rope(x, positions, loaded.spec.rope, loaded.rope_length(1))[:, :, 0])
            values.append(reached.values.float()[:, :, 0])
    table = TokenTable(torch.cat(keys).cpu(), torch.cat(values).cpu())
    _require_finite(loaded, table)
    return table


class _PausingCache(DynamicCache):
    """Calls ``before_layer`` where a layer hands over its keys and values."""

    def __init__(self, before_layer: Callable[[], None]) -> None:
        super().__init__()
        self._before_layer = before_layer

    def update(self, *given: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._before_layer()
        return super().update(*given, **more)


class _FirstLayerError(Exception):
    """Ends a pass, carrying layer 0's keys and values [batch, num_kv_heads, num_tokens, head_dim]
    out of it.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class _FirstLayerCache(DynamicCache):
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> NoReturn:
        raise _FirstLayerError(key_states, value_states)


def _stacked(cache: DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated keys, and values, of one sequence: [num_layers, num_kv_heads, num_tokens,
    head_dim].
    """
    layers: Any = cache.layers
    return (
        torch.stack([layer.keys[0] for layer in layers]),
        torch.stack([layer.values[0] for layer in layers]),
    )


def _run(loaded: LoadedModel, token_ids: torch.Tensor, cache: DynamicCache) -> None:
    base = loaded.model.base_model  # without the head: no logits
    base(input_ids=token_ids, use_cache=True, **{loaded.cache_argument: cache})


def _require_finite(model: KnownModel, kv: CapturedKv | TokenTable) -> None:
    if not bool(torch.isfinite(kv.keys.sum() + kv.values.sum())):
        raise NumericsError(
            f"{model.name} computes keys or values that are NaN or infinite; its weights are "
            f"damaged, or overflow their type. Load a sound copy, or use float32."
        )
