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
    dtype: Literal["float32", "float16", "bfloat16"] = field(
        default="float32", metadata={"help": "Type the weights are stored in."}
    )

    def __post_init__(self) -> None:
        for name in ("k", "n"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise InputError(f"ridge must be zero or a positive number, got {self.ridge}.")
        _require_one_of("fields", self.fields, ("same", "both"))
        _require_one_of("dtype", self.dtype, ("float32", "float16", "bfloat16"))


def _require_one_of(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise InputError(f"{name} must be one of {', '.join(known)}; got {given!r}.")
