"""What a model repository is written from."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_kvmap.decode.routing.speeds import Speeds
from trtllm_kvmap.errors import InputError

SPEEDS = "speeds.json"  # in the folder of a pipeline model: requests are routed by it


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How a deployment hands over."""

    first_tokens: int = field(default=1, metadata={"help": "S: first tokens the target computes"})
    repair_window: int = field(default=32, metadata={"help": "N: last tokens the target computes"})
    max_held_tokens: int = field(
        default=65_536, metadata={"help": "tokens of conversations the source keeps (hf lane)"}
    )
    traffic: str = field(
        default="",
        metadata={"help": "folder for moments of requests that consent; empty: none (hf lane)"},
    )
    traffic_share: float = field(
        default=0.1, metadata={"help": "of the target's time, at most so much is spent on them"}
    )

    def __post_init__(self) -> None:
        for name in ("first_tokens", "repair_window", "max_held_tokens"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}.")
        if not 0 < self.traffic_share <= 1:
            raise InputError(
                f"traffic_share must lie above 0 and be at most 1, got {self.traffic_share}."
            )


@dataclass(frozen=True, slots=True)
class Served:
    """The pair of one repository, with absolute paths (or hub ids) of models and map. ``mapper_id``
    is the name clients may ask for the map by. With ``speeds`` requests are routed by them.
    """

    kvmap: str
    source: str
    target: str
    mapper_id: str
    allow_unproven: bool
    config: ServeConfig
    speeds: Speeds | None = None
