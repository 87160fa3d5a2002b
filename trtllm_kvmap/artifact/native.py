"""What the target computes from tokens alone, carried in the files so that a host need not run the
target for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SinkEntry:
    """The target's exact KV of one token prefix: keys (rotated, as in a sequence no longer than the
    prefix) and values, [num_layers, num_kv_heads, n, head_dim].
    """

    token_ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor

    def shared_length(self, token_ids: Sequence[int]) -> int:
        """How many first tokens this prefix and ``token_ids`` have in common."""
        length = 0
        for mine, theirs in zip(self.token_ids, token_ids, strict=False):
            if mine != theirs:
                break
            length += 1
        return length

    def first(self, length: int) -> SinkEntry:
        """The entry of the first ``length`` tokens. Exact: a causal model's KV of a token does not
        depend on the tokens after it.
        """
        keys, values = self.keys[:, :, :length], self.values[:, :, :length]
        return SinkEntry(self.token_ids[:length], keys, values)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The target's layer-0 KV of every token id: pre-RoPE keys and values, [vocab_size,
    num_kv_heads, head_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor


def native_to_tensors(
    table: TokenTable | None, sinks: Sequence[SinkEntry]
) -> dict[str, torch.Tensor]:
    """Named tensors for a file; the token prefixes of ``sinks`` go into its header."""
    tensors: dict[str, torch.Tensor] = {}
    for number, entry in enumerate(sinks):
        tensors[f"sink.{number}.keys"], tensors[f"sink.{number}.values"] = entry.keys, entry.values
    if table is not None:
        tensors["token_table.keys"], tensors["token_table.values"] = table.keys, table.values
    return tensors


def native_from_tensors(
    tensors: dict[str, torch.Tensor], prefixes: Sequence[Sequence[int]]
) -> tuple[TokenTable | None, tuple[SinkEntry, ...]]:
    """The inverse of native_to_tensors; raises KeyError when a tensor is missing."""
    sinks = tuple(
        SinkEntry(tuple(prefix), tensors[f"sink.{number}.keys"], tensors[f"sink.{number}.values"])
        for number, prefix in enumerate(prefixes)
    )
    table = None
    if "token_table.keys" in tensors:
        table = TokenTable(tensors["token_table.keys"], tensors["token_table.values"])
    return table, sinks
