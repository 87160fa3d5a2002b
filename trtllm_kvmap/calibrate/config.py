"""What a calibration is asked for. The fields are the flags of `trtllm-kvmap calibrate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.spec.model import ModelSpec

Weighting = Literal["uniform", "sensitivity", "attention"]


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """Which columns are summed together, and over which tokens."""

    scope: Literal["all", "head"] = field(
        default="all",
        metadata={
            "help": "all: the keys of all source heads together, and the values; head: each head "
            "apart, far less memory, for maps of scope head"
        },
    )
    joint: bool = field(
        default=False,
        metadata={
            "help": "sum keys and values together, for maps that cross them (fit --fields both)"
        },
    )
    layers: tuple[int, ...] = field(
        default=(),
        metadata={
            "help": "a band of target layers: --layers FIRST --layers END, one past the last (all)"
        },
    )
    skip_first: int = field(
        default=4,
        metadata={
            "help": "first tokens of a document to leave out: attention sinks, which the target "
            "always computes itself"
        },
    )
    max_tokens: int = field(
        default=1024, metadata={"help": "longer documents are read in windows of so many tokens"}
    )
    weighting: Weighting = field(
        default="uniform",
        metadata={
            "help": "uniform: every token counts alike; sensitivity: by how much the target's next "
            "words depend on its keys and values, each layer apart; attention: by how much they "
            "attend to it"
        },
    )
    ess_floor: float = field(
        default=0.02,
        metadata={
            "help": "how many tokens in one must still count, however unequal their weights: an "
            "effective sample size, as a share (sensitivity, attention)"
        },
    )
    checkpoint_every: int = field(
        default=64, metadata={"help": "documents between two checkpoints of OUT.partial"}
    )

    def __post_init__(self) -> None:
        if self.scope not in ("all", "head"):
            raise InputError(f"scope must be all or head, got {self.scope!r}.")
        if self.layers and not (len(self.layers) == 2 and 0 <= self.layers[0] < self.layers[1]):
            raise InputError(
                f"layers must be the first target layer and one past the last, got {self.layers}."
            )
        for name, least in (("skip_first", 0), ("checkpoint_every", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.weighting not in get_args(Weighting):
            raise InputError(
                f"weighting must be one of {', '.join(get_args(Weighting))}; got "
                f"{self.weighting!r}."
            )
        if not 0 < self.ess_floor <= 1:
            raise InputError(f"ess_floor must lie above 0 and be at most 1, got {self.ess_floor}.")
        if self.max_tokens <= self.min_tokens:
            raise InputError(
                f"max_tokens must leave two tokens after skip_first = {self.skip_first}; got "
                f"{self.max_tokens}."
            )

    @property
    def min_tokens(self) -> int:
        """A document needs this many tokens to add anything: one after the first ones, and one that
        is read after it when tokens are weighed.
        """
        return self.skip_first + (1 if self.weighting == "uniform" else 2)

    def window(self, source: ModelSpec, target: ModelSpec) -> int:
        """The longest document, in tokens, that both models are given."""
        return min(self.max_tokens, source.max_positions, target.max_positions)
