"""Rotary position embedding as arithmetic: the frequencies of every kind, and the table a map
reads.

The kinds and their formulas: default (Su et al. 2021, arXiv 2104.09864), linear (Chen et al. 2023,
arXiv 2306.15595), dynamic (NTK-aware scaling by current length), yarn (Peng et al. 2023, arXiv
2309.00071), llama3 (Llama 3.1's wavelength-dependent scaling) and longrope (Ding et al. 2024, arXiv
2402.13753).

``dynamic`` and ``longrope`` depend on how long the sequence was when a key was written.
``rope_length`` carries that length; a span whose keys were written on both sides of a change has no
single table and is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trtllm_kvmap.errors import InputError, MismatchError

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class RopeParams:
    """How one model rotates its keys.

    ``rotary_dim`` channels of each head rotate (partial rotary when smaller than head_dim), paired
    half-split (channel i with i + rotary_dim / 2) or ``interleaved`` (2i with 2i + 1).
    ``original_length`` is the length the frequencies were trained at, in tokens. Fields that a kind
    does not use keep their defaults.
    """

    kind: str = "default"
    theta: float = 10000.0
    rotary_dim: int = 0
    interleaved: bool = False
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(
                f"RoPE kind {self.kind!r} is not known; use one of {', '.join(KINDS)}."
            )
        if self.rotary_dim < 0 or self.rotary_dim % 2:
            raise InputError(f"rotary_dim must be even and not negative, got {self.rotary_dim}.")
        if self.kind == "longrope":
            for name, factors in (
                ("short_factor", self.short_factor),
                ("long_factor", self.long_factor),
            ):
                if len(factors) != self.rotary_dim // 2:
                    raise InputError(
                        f"longrope needs {self.rotary_dim // 2} values of {name} "
                        f"(half of rotary_dim), got {len(factors)}."
                    )

    @property
    def length_dependent(self) -> bool:
        return self.kind in ("dynamic", "longrope")

    def regime(self, length: int) -> int:
        """The length that stands for ``length``: equal for two lengths exactly when their
        frequencies are, and with these frequencies itself.
        """
        if self.kind == "dynamic":
            return max(length, self.original_length)
        if self.kind == "longrope":
            return self.original_length + 1 if length > self.original_length else 0
        return 0

    def inverse_frequencies(self, rope_length: int = 0) -> np.ndarray:
        """float64 [rotary_dim / 2], radians per token, for a key written when the sequence was
        ``rope_length`` long.
        """
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / max(self.rotary_dim, 1)
        base = np.asarray(self.theta**-exponent, dtype=np.float64)
        match self.kind:
            case "linear":
                return np.asarray(base / self.factor)
            case "dynamic":
                return self._dynamic(exponent, rope_length)
            case "yarn":
                return self._yarn(base)
            case "llama3":
                return self._llama3(base)
            case "longrope":
                long = rope_length > self.original_length
                factors = np.asarray(self.long_factor if long else self.short_factor, np.float64)
                return np.asarray(base / factors)
        return base

    def _dynamic(self, exponent: np.ndarray, rope_length: int) -> np.ndarray:
        length = max(rope_length, self.original_length)
        stretch = self.factor * length / self.original_length - (self.factor - 1.0)
        theta = self.theta * stretch ** (self.rotary_dim / (self.rotary_dim - 2))
        return np.asarray(theta**-exponent, dtype=np.float64)

    def _yarn(self, base: np.ndarray) -> np.ndarray:
        def channel_of(rotations: float) -> float:
            turns = self.original_length / (rotations * 2 * math.pi)
            return self.rotary_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = channel_of(self.beta_fast), channel_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        ramp = (np.arange(self.rotary_dim // 2) - low) / max(high - low, 1e-3)
        interpolate = np.clip(ramp, 0.0, 1.0)
        return np.asarray(base / self.factor * interpolate + base * (1.0 - interpolate))

    def _llama3(self, base: np.ndarray) -> np.ndarray:
        wavelength = 2 * math.pi / base
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_length / wavelength - low) / (high - low)
        blended = (1 - smooth) * base / self.factor + smooth * base
        result = np.where(wavelength > self.original_length / low, base / self.factor, blended)
        return np.where(wavelength < self.original_length / high, base, result)


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin, float64 [num_positions, rotary_dim / 2]; ``scale`` multiplies a rotated key
    (attention_factor).

    A table speaks of positions 0 .. num_positions - 1 and of one rope_length. Kernels read tables
    and never learn which kind made them.
    """

    cos: np.ndarray
    sin: np.ndarray
    scale: float
    interleaved: bool

    @property
    def num_positions(self) -> int:
        return int(self.cos.shape[0])

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.cos.shape[1])


def rope_table(rope: RopeParams, num_positions: int, rope_length: int = 0) -> RopeTable:
    """The table of ``rope`` for positions below ``num_positions``, keys written at length
    ``rope_length`` (tokens).
    """
    angles = np.outer(
        np.arange(num_positions, dtype=np.float64), rope.inverse_frequencies(rope_length)
    )
    return RopeTable(np.cos(angles), np.sin(angles), rope.attention_factor, rope.interleaved)


def written_length(rope: RopeParams, lengths: list[int]) -> int:
    """The one rope_length of keys written in forward passes that ended at ``lengths``; refuses a
    change between them.

    A host that reads a prompt in chunks passes the sequence length at the end of each chunk.
    """
    regimes = {rope.regime(length) for length in lengths}
    if len(regimes) > 1:
        raise MismatchError(
            f"The keys were written in passes ending at {lengths} tokens, across a change of "
            f"{rope.kind} RoPE "
            f"frequencies; un-rotating them needs one set. Read the prompt in one pass, or "
            f"re-prefill."
        )
    return max(lengths, default=0)
