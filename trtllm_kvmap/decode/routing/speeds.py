"""What two models and a map were measured to take on one host."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.errors import InputError, reason
from trtllm_kvmap.spec.model import ModelSpec

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds by number of tokens: straight lines through the measured ``points`` (tokens,
    seconds). Behind the last its line goes on; before the first a pass takes as long as there, for
    what it costs to begin is the same. A single point is a rate.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        tokens = [point[0] for point in self.points]
        rising = all(a < b for a, b in zip([0, *tokens], tokens, strict=False))
        if not self.points or not rising:
            raise InputError(
                f"A timing needs at least one point, and rising token counts above 0; got {tokens}."
            )
        if not all(math.isfinite(s) and s >= 0 for _, s in self.points):
            raise InputError(f"A timing needs seconds of at least 0, got {self.points}.")

    def seconds(self, tokens: np.ndarray | int) -> np.ndarray:
        """float64, shaped as ``tokens``."""
        n = np.asarray(tokens, dtype=np.float64)
        x, y = map(np.array, zip(*self.points, strict=True))
        if len(x) == 1:
            return np.asarray(n * y[0] / x[0])
        slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0)
        return np.asarray(np.interp(n, x, y) + np.maximum(n - x[-1], 0) * slope)


@dataclass(frozen=True, slots=True)
class Speeds:
    """One pair on one host. Timings are by tokens of the prompt: what a model takes to read it,
    the map to map it, and the target to compute the last ``repair_window`` of it over the rest.
    ``source_decode`` and ``target_decode`` are tokens per second of one sequence;
    ``transfer_bytes_per_second`` is the way between the two (None: they share memory).
    """

    source_prefill: Timing
    target_prefill: Timing
    map: Timing
    repair: Timing
    repair_window: int
    source_decode: float
    target_decode: float
    transfer_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        rates = self.source_decode, self.target_decode, self.transfer_bytes_per_second
        if not all(rate is None or (math.isfinite(rate) and rate > 0) for rate in rates):
            raise InputError(
                f"Decode and transfer speeds must be positive, got {rates[0]}, {rates[1]} tokens "
                f"and {rates[2]} bytes a second."
            )
        if self.repair_window < 1:
            raise InputError(f"repair_window must be at least 1, got {self.repair_window}.")

    def transfer(self, tokens: np.ndarray | int, bytes_per_token: int) -> np.ndarray:
        """Seconds to send the source's keys and values of ``tokens``."""
        rate = self.transfer_bytes_per_second
        return np.asarray(tokens) * (0.0 if rate is None else bytes_per_token / rate)

    def to_json(self) -> dict[str, Any]:
        timings = {
            f.name: {str(n): s for n, s in value.points}
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Timing)
        }
        return {**asdict(self), **timings}

    @staticmethod
    def from_json(entry: Any) -> Speeds:
        """Raises InputError for anything but what to_json gives: {"source_prefill": {"1024": 0.8,
        ...}, ..., "source_decode": 50.0, ...}.
        """
        names = [f.name for f in fields(Speeds)]
        if not isinstance(entry, dict) or set(entry) != set(names):
            given = type(entry).__name__
            if isinstance(entry, dict):
                given = ", ".join(map(repr, sorted(entry, key=str))) or "none"
            raise InputError(
                f"Speeds need exactly the entries {', '.join(map(repr, names))}; got {given}. "
                f"`trtllm-kvmap plan --measure --speeds FILE` writes them."
            )
        try:
            timed = {
                name: Timing(tuple(sorted((int(n), float(s)) for n, s in entry[name].items())))
                for name in ("source_prefill", "target_prefill", "map", "repair")
            }
            return Speeds(**{**entry, **timed})
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"Speeds need an object of seconds by tokens for each timing and a number for "
                f"everything else ({error}); write them with plan --measure."
            ) from error

    def save(self, path: str | Path) -> None:
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | Path) -> Speeds:
        """Raises InputError when no speeds can be read from ``path``."""
        try:
            entry = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"{path} cannot be read as speeds ({reason(error)}). "
                f"`trtllm-kvmap plan --measure --speeds FILE` writes them."
            ) from error
        return Speeds.from_json(entry)


def bytes_per_token(spec: ModelSpec) -> int:
    """What a token's keys and values take in the cache of ``spec``, at the model's dtype."""
    layers, heads, head_dim = spec.kv_shape
    return 2 * layers * heads * head_dim * ITEM_BYTES.get(spec.dtype, 4)
