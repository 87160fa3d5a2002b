"""What a refinement is asked for. The fields are the flags of `trtllm-kvmap refine`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from trtllm_kvmap.errors import InputError


@dataclass(frozen=True, slots=True)
class RefineConfig:
    """Second terms for the groups of a fitted map, whose matrices stay as they are."""

    term: Literal["residual", "mlp"] = field(
        default="residual",
        metadata={
            "help": "residual: a narrow network trained on what the target then says (KL); mlp: a "
            "wide one trained on the target's keys and values, for pairs that no matrix fits"
        },
    )
    hidden: int = field(
        default=0, metadata={"help": "channels of the network (0: 16 for residual, 1,024 for mlp)"}
    )
    teacher: Literal["target", "source"] = field(
        default="target",
        metadata={"help": "whose next words the mapped target is trained to say (residual)"},
    )
    steps: int = field(
        default=400, metadata={"help": "steps of the optimiser: documents, or batches of tokens"}
    )
    learning_rate: float = field(
        default=3e-3, metadata={"help": "of Adam, at the start; it falls to 0 (cosine)"}
    )
    batch_tokens: int = field(default=1024, metadata={"help": "tokens in a batch (mlp)"})
    skip_first: int = field(
        default=4, metadata={"help": "first tokens of a document, which are never mapped"}
    )
    held_out: float = field(
        default=0.2,
        metadata={"help": "share of the documents that choose the scale and train nothing"},
    )
    seed: int = field(
        default=0, metadata={"help": "draws the first weights and the order of the text"}
    )

    def __post_init__(self) -> None:
        for name, known in (("term", ("residual", "mlp")), ("teacher", ("target", "source"))):
            if getattr(self, name) not in known:
                raise InputError(
                    f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}."
                )
        for name, least in (("hidden", 0), ("steps", 1), ("batch_tokens", 1), ("skip_first", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InputError(f"learning_rate must be a positive number, got {self.learning_rate}.")
        if not 0 < self.held_out < 1:
            raise InputError(f"held_out must lie between 0 and 1, got {self.held_out}.")

    @property
    def width(self) -> int:
        return self.hidden or (16 if self.term == "residual" else 1024)
