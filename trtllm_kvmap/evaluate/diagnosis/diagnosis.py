"""What a diagnosis found: where the divergence of a mapped cache lives, as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trtllm_kvmap.artifact.json_file import read_json
from trtllm_kvmap.errors import FormatError
from trtllm_kvmap.evaluate.plain_json import require_plain

FigureJson = dict[str, float | None]  # value, low and high, see bootstrap.Figure
UNKNOWN: FigureJson = {"value": None, "low": None, "high": None}


@dataclass(frozen=True, slots=True)
class Intervention:
    """A mapped cache of which one region was replaced (or one thing spoilt, group ``control``).

    ``group`` says which regions are compared: ``field``, ``layer``, ``head``, ``position``,
    ``kind`` are replaced one at a time, ``layers_below`` and ``layers_above`` cumulatively.
    ``field`` (key or value), ``layer`` and ``head`` are None where all of them were replaced.
    ``divergence`` is KL(native || this), nats per token asked; ``removed`` the share of the mapped
    cache's divergence that is gone: 1 is the native target, negative is worse than mapped.
    """

    group: str
    name: str
    field: str | None
    layer: int | None
    head: int | None
    divergence: FigureJson
    removed: FigureJson


@dataclass(frozen=True, slots=True)
class TokenError:
    """The error of mapped keys and values at some tokens: squared, over the variance that all
    mapped tokens of the context have, mean over layers (1 - R2; 0 is exact). ``group`` is
    ``position`` or ``kind``; ``tokens`` were counted.
    """

    group: str
    name: str
    tokens: int
    key: float
    value: float


@dataclass(frozen=True, slots=True)
class LengthRow:
    """The map on contexts of at most ``tokens`` tokens; ``beyond_calibration``: the longest of them
    is longer than any document that the map was fitted on (None: it does not say). The losses are
    nats per token; the accuracies are None where nothing was asked. ``gap_recovered`` is of the
    metric that the diagnosis' config names.
    """

    tokens: int
    beyond_calibration: bool | None
    nll: FigureJson
    source_nll: FigureJson
    target_nll: FigureJson
    gap_recovered: FigureJson
    divergence: FigureJson
    accuracy: FigureJson = field(default_factory=UNKNOWN.copy)
    source_accuracy: FigureJson = field(default_factory=UNKNOWN.copy)
    target_accuracy: FigureJson = field(default_factory=UNKNOWN.copy)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The content of a diagnosis file, key by key. ``config`` names models, map, S, N, the
    metric of gap_recovered and what was asked (see asked.asked); ``divergence`` is the mapped
    cache's; ``kv_error`` as in a report (by layer: nrmse and cosine of keys and values);
    ``attention_cosine`` the attention outputs' cosine by layer; ``refused`` says why a control was
    not run.
    """

    config: dict[str, Any]
    divergence: FigureJson
    interventions: tuple[Intervention, ...]
    kv_error: dict[str, Any]
    attention_cosine: dict[str, Any]
    tokens: tuple[TokenError, ...]
    lengths: tuple[LengthRow, ...]
    refused: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            name: list(held) if isinstance(held, tuple) else held
            for name, held in asdict(self).items()
        }

    @staticmethod
    def from_json(entry: Any, name: str = "This") -> Diagnosis:
        """The inverse of to_json, also after a round through JSON text. Raises FormatError, which
        begins with ``name``, for other entries than a diagnosis has.
        """
        names = {f.name for f in fields(Diagnosis)}
        if not isinstance(entry, dict) or set(entry) != names:
            raise FormatError(
                f"{name} is not a diagnosis of this version: {unlike(entry, names)}. Write it "
                f"again with `trtllm-kvmap diagnose`."
            )
        rows = {"interventions": Intervention, "tokens": TokenError, "lengths": LengthRow}
        try:
            made = {name: tuple(row(**each) for each in entry[name]) for name, row in rows.items()}
            return Diagnosis(**{**entry, **made, "config": dict(**entry["config"])})
        except (LookupError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{name} is not a diagnosis ({error!r}). Write it again with `trtllm-kvmap "
                f"diagnose`."
            ) from error

    @staticmethod
    def load(path: str | Path) -> Diagnosis:
        """Raises FormatError when there is no diagnosis at ``path``."""
        entry = read_json(path, "a diagnosis", "trtllm-kvmap diagnose --json")
        require_plain(entry, str(path))
        return Diagnosis.from_json(entry, str(path))


def unlike(entry: Any, names: set[str]) -> str:
    """What ``entry`` lacks of the entries ``names`` and what it has beside them, in words."""
    if not isinstance(entry, dict):
        return f"it must hold entries with names, got {type(entry).__name__}"
    lacks, more = sorted(names - set(entry)), sorted(set(entry) - names)
    said = [f"it lacks {', '.join(lacks)}"] if lacks else []
    return " and ".join([*said, *([f"it has {', '.join(more)} beside its own"] if more else [])])
