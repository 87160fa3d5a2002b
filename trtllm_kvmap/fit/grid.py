"""A grid of candidate fits. The fields are the flags of `trtllm-kvmap fit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from trtllm_kvmap.fit.config import FitConfig


@dataclass(frozen=True, slots=True)
class FitGrid:
    """Every combination of the values given; an axis counts only for the scopes that read it."""

    scope: tuple[str, ...] = field(
        default=("slice",),
        metadata={
            "help": "what a target head reads: the same head of the nearest layer, unlearned "
            "(copy), that head of k layers (head), all heads of k layers (pooled), or n single "
            "heads of any layer (slice); repeatable"
        },
    )
    k: tuple[int, ...] = field(
        default=(4,), metadata={"help": "source layers a head reads (head, pooled); repeatable"}
    )
    n: tuple[int, ...] = field(
        default=(8,),
        metadata={"help": "source heads, of any layer, that a head reads (slice); repeatable"},
    )
    ridge: tuple[float, ...] = field(
        default=(1e-3,),
        metadata={"help": "penalty, relative to each slice's mean variance; repeatable"},
    )
    fields: Literal["same", "both"] = field(
        default="same",
        metadata={
            "help": "same: keys are read for keys, values for values; both: both for either (after "
            "calibrate --joint)"
        },
    )
    own_slices: bool = field(
        default=True,
        metadata={
            "help": "also read the target's own layer 0, which the token alone decides (slice)"
        },
    )
    rank: tuple[int, ...] = field(
        default=(0,), metadata={"help": "rank of each matrix, 0 for full; repeatable"}
    )
    cut: tuple[str, ...] = field(
        default=("data",),
        metadata={
            "help": "what a low rank loses least of: what the target makes of keys and values "
            "(output, after calibrate --weighting), their error (data), the weight's own singular "
            "values (plain); repeatable"
        },
    )
    dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"] = field(
        default="float32", metadata={"help": "type the weights are stored in"}
    )

    def candidates(self) -> list[FitConfig]:
        """The distinct configurations, in order. Raises InputError as FitConfig does."""
        found: dict[FitConfig, None] = {}
        axes = self.scope, self.k, self.n, self.ridge, self.rank, self.cut
        for scope, k, n, ridge, rank, cut in product(*axes):
            learned = scope != "copy"
            found[
                FitConfig(
                    scope=scope,
                    k=k if scope in ("head", "pooled") else self.k[0],
                    n=n if scope == "slice" else self.n[0],
                    ridge=ridge if learned else self.ridge[0],
                    fields=self.fields,
                    own_slices=self.own_slices,
                    rank=rank if learned else 0,
                    cut=cut if learned and rank else self.cut[0],
                    dtype=self.dtype,
                )
            ] = None
        return list(found)
