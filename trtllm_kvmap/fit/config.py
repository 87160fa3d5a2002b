"""What a fit is asked for. The fields are the flags of `trtllm-kvmap fit`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from trtllm_kvmap.errors import InputError


@dataclass(frozen=True, slots=True)
class FitConfig:
    """One candidate map. Options that a scope does not read are ignored by it."""

    scope: str = field(
        default="slice", metadata={"help": "Which slices a target head reads: see the scopes."}
    )
    k: int = field(
        default=4, metadata={"help": "Source layers a target head reads (head and pooled)."}
    )
    n: int = field(default=8, metadata={"help": "Slices a target head reads (slice)."})
    ridge: float = field(
        default=1e-3, metadata={"help": "Penalty, relative to each slice's mean variance."}
    )
    fields: Literal["same", "both"] = field(
        default="same",
        metadata={"help": "Read keys for keys and values for values, or both for each."},
    )
    own_slices: bool = field(
        default=True,
        metadata={"help": "Let target heads also read the target's own layer 0 (slice)."},
    )
    rank: int = field(
        default=0,
        metadata={"help": "Rank of a group's matrix (0: as it is fitted)."},
    )
    cut: str = field(
        default="data",
        metadata={
            "help": "What a low rank loses least of: what the target makes of keys and values "
            "(output, after calibration with weighting sensitivity or attention), their error "
            "(data), or the weight's own singular values (plain)."
        },
    )
    dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"] = field(
        default="float32",
        metadata={"help": "Type the weights are stored in (float8: with a scale per column)."},
    )

    def __post_init__(self) -> None:
        _require_one_of("scope", self.scope, ("copy", "head", "pooled", "slice"))
        for name in ("k", "n"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise InputError(f"ridge must be zero or a positive number, got {self.ridge}.")
        _require_one_of("fields", self.fields, ("same", "both"))
        _require_one_of("cut", self.cut, ("output", "data", "plain"))
        _require_one_of("dtype", self.dtype, ("float32", "float16", "bfloat16", "float8_e4m3fn"))
        if self.rank < 0:
            raise InputError(f"rank must not be negative, got {self.rank}.")
        if self.rank and self.dtype != "float32":
            raise InputError(
                f"Low-rank maps are stored in float32; leave dtype {self.dtype} or the rank out."
            )


def _require_one_of(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise InputError(f"{name} must be one of {', '.join(known)}; got {given!r}.")
