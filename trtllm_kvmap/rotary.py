"""RoPE on torch tensors: put on and taken off keys, in float32 or float64, on any device.

The formula (Su et al. 2021, arXiv 2104.09864): a pair of channels (a, b) at position p becomes
``scale * (a cos - b sin, b cos + a sin)`` with the angle ``p * inverse_frequency``. Channels beyond
``rotary_dim`` are left as they are. Taking it off is the same turn backwards, divided by ``scale``.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.spec.rope import RopeParams, rope_table


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, rope: RopeParams, rope_length: int = 0
) -> torch.Tensor:
    """Rotated keys, shape and dtype of ``x`` [..., num_tokens, head_dim], float32 or float64.

    ``positions`` is int64 [num_tokens]; ``rope_length`` is the length, in tokens, of the sequence
    the keys are written in (dynamic and longrope depend on it). Raises InputError for another
    dtype.
    """
    _require_wide(x)
    y = x.clone()
    rotate_(y, *applying_rows(positions, rope, rope_length, x.dtype), rope.interleaved)
    return y


def remove_rope(
    x: torch.Tensor, positions: torch.Tensor, rope: RopeParams, rope_length: int = 0
) -> torch.Tensor:
    """Un-rotated keys: the inverse of apply_rope, with the same shapes, dtypes and errors."""
    _require_wide(x)
    y = x.clone()
    rotate_(y, *removing_rows(positions, rope, rope_length, x.dtype), rope.interleaved)
    return y


def applying_rows(
    positions: torch.Tensor, rope: RopeParams, rope_length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [num_tokens, rotary_dim / 2] each, times the attention factor."""
    if positions.numel() == 0:
        empty = torch.empty(0, rope.rotary_dim // 2, dtype=dtype, device=positions.device)
        return empty, empty
    # Powers of two, so that a growing conversation makes a new table only when it has doubled.
    size = 1 << int(positions.max()).bit_length()
    cos, sin = _table(rope, rope.regime(rope_length), size, dtype, positions.device)
    return cos[positions], sin[positions]


def removing_rows(
    positions: torch.Tensor, rope: RopeParams, rope_length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the turn that undoes applying_rows."""
    cos, sin = applying_rows(positions, rope, rope_length, dtype)
    square = rope.attention_factor**2
    return cos / square, -sin / square


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Turn ``x`` [..., num_tokens, head_dim] in place by rows [num_tokens, rotary_dim / 2]."""
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)


@lru_cache(maxsize=8)
def _table(
    rope: RopeParams, regime: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    table = rope_table(rope, size, regime)
    cos, sin = (torch.from_numpy(part * table.scale) for part in (table.cos, table.sin))
    return cos.to(device, dtype), sin.to(device, dtype)


def _require_wide(x: torch.Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"RoPE is computed in float32 or float64, got {x.dtype}; convert the keys first."
        )
