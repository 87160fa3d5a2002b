"""What became of one request's hand-over, for its response."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["applied", "fallback_reprefill", "unsupported"]


@dataclass(frozen=True, slots=True)
class HandoffStatus:
    """``applied``: the answer stands on mapped KV. ``fallback_reprefill``: the target computed what
    was to be mapped. ``unsupported``: the request asked for what cannot be. The last two have a
    ``reason``, and their answers are the target's own.

    Counts of prompt tokens: ``already_exact`` and ``already_approximate`` were in the engine's
    cache under the request's own salt, ``spliced`` came with the offer as the target's own KV,
    ``sink`` from the map's sink table, ``mapped`` from the source; the target computed the rest of
    ``prompt``. On ``sink_missed`` first tokens the table had nothing, so they were mapped.
    """

    state: State
    reason: str
    prompt: int
    already_exact: int = 0
    already_approximate: int = 0
    spliced: int = 0
    sink: int = 0
    mapped: int = 0
    sink_missed: int = 0

    @property
    def matched(self) -> int:
        """The tokens the engine was spared beyond its own cache."""
        return self.spliced + self.sink + self.mapped

    @property
    def computed(self) -> int:
        """The prompt tokens that the target computed itself."""
        return self.prompt - self.already_exact - self.already_approximate - self.matched

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "matched": self.matched, "computed": self.computed}
