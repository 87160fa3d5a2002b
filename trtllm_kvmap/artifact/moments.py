"""Moments: everything a linear fit needs to know of the calibration text, added up in one pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trtllm_kvmap.artifact.container import read_container, read_content, write_container
from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.native import (
    SinkEntry,
    TokenTable,
    native_from_tensors,
    native_to_tensors,
)
from trtllm_kvmap.artifact.pair import pair_from_json, pair_to_json
from trtllm_kvmap.artifact.record import (
    slices_from_json,
    slices_to_json,
    spec_from_json,
)
from trtllm_kvmap.errors import FormatError, MismatchError
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.slices import Slice

FORMAT_VERSION = 2  # of weighed moments; others are written as version 1
KIND = "moments"


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over tokens of source columns x [F] and target columns y [T], float64, uncentred.

    gram = sum x x^T [F, F]; cross = sum x y^T [F, T]; source_sum = sum x [F]; target_sum = sum y
    [T]; target_square = sum y*y [T]; count = number of tokens. They add: over batches, ranks and
    traffic.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    source_sum: torch.Tensor
    target_sum: torch.Tensor
    target_square: torch.Tensor
    count: int

    @staticmethod
    def zeros(source_width: int, target_width: int) -> Moments:
        f64 = torch.float64
        return Moments(
            gram=torch.zeros(source_width, source_width, dtype=f64),
            cross=torch.zeros(source_width, target_width, dtype=f64),
            source_sum=torch.zeros(source_width, dtype=f64),
            target_sum=torch.zeros(target_width, dtype=f64),
            target_square=torch.zeros(target_width, dtype=f64),
            count=0,
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.gram, self.cross, self.source_sum, self.target_sum, self.target_square

    def __add__(self, other: Moments) -> Moments:
        if self.cross.shape != other.cross.shape:
            raise MismatchError(
                f"Moments of {tuple(self.cross.shape)} columns cannot be added to moments of "
                f"{tuple(other.cross.shape)}; both must come from the same pair and the same shard."
            )
        a, b, c, d, e = (x + y for x, y in zip(self.tensors(), other.tensors(), strict=True))
        return Moments(a, b, c, d, e, self.count + other.count)


@dataclass(frozen=True, slots=True)
class MomentPart:
    """The moments of one group of columns: source slices in order, target slices in order.

    A fit can only use slices that stand in one part together. ``slices`` may include the target's
    own layer 0 (origin "target"); ``targets`` are the target's slices to be predicted. ``cost``,
    float64 [targets, head_dim, head_dim], is there when rows were weighed: with its matrix M of a
    target slice, e^T M e is what an error e of that slice costs (calibrate/regard.py).
    """

    slices: tuple[Slice, ...]
    targets: tuple[Slice, ...]
    moments: Moments
    cost: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MomentSet:
    """The parts calibrated for one pair, and where they came from. The content of a
    .moments.safetensors file.

    ``record`` is JSON: ``config`` (the calibration's), ``text`` (a list of digests), ``documents``
    and ``tokens`` (counts). ``token_table`` and ``sinks`` are the target's own, measured in the
    same pass; a fit hands them on to the map.
    """

    source: ModelSpec
    target: ModelSpec
    source_fingerprint: Fingerprint
    target_fingerprint: Fingerprint
    parts: tuple[MomentPart, ...]
    record: dict[str, Any]
    token_table: TokenTable | None = None
    sinks: tuple[SinkEntry, ...] = ()

    def __add__(self, other: MomentSet) -> MomentSet:
        """The sum of two calibrations of the same pair and shard; documents, tokens and text
        digests in ``record`` add too.
        """
        mine = (self.source_fingerprint, self.target_fingerprint)
        if mine != (other.source_fingerprint, other.target_fingerprint):
            raise MismatchError(
                "The two moments files come from different models; calibrate both with the same "
                "pair."
            )
        weightings = [
            moments.record.get("config", {}).get("weighting", "uniform")
            for moments in (self, other)
        ]
        if weightings[0] != weightings[1]:
            raise MismatchError(
                f"The two moments files weigh their tokens by {' and '.join(weightings)}, so that "
                f"their sums are of different things; calibrate both with the same weighting."
            )
        if [(p.slices, p.targets) for p in self.parts] != [
            (p.slices, p.targets) for p in other.parts
        ]:
            raise MismatchError(
                "The two moments files cover different columns; calibrate both with the same "
                "scope and layer band."
            )
        parts = tuple(
            replace(
                a,
                moments=a.moments + b.moments,
                cost=None if a.cost is None or b.cost is None else a.cost + b.cost,
            )
            for a, b in zip(self.parts, other.parts, strict=True)
        )
        counted = {
            key: self.record[key] + other.record[key] for key in ("documents", "tokens", "text")
        }
        return replace(self, parts=parts, record={**self.record, **counted})

    def save(self, path: str | Path) -> None:
        """Write to ``path`` through a temporary file; the file is whole or absent, never half."""
        tensors = native_to_tensors(self.token_table, self.sinks)
        index = []
        for number, part in enumerate(self.parts):
            for name, tensor in zip(_NAMES, part.moments.tensors(), strict=True):
                tensors[f"{number}.{name}"] = tensor
            if part.cost is not None:
                tensors[f"{number}.cost"] = part.cost
            index.append(
                {
                    "slices": slices_to_json(part.slices),
                    "targets": slices_to_json(part.targets),
                    "count": part.moments.count,
                }
            )
        content = {
            **pair_to_json(self),
            "parts": index,
            "sinks": [list(entry.token_ids) for entry in self.sinks],
            "record": self.record,
        }
        weighed = any(part.cost is not None for part in self.parts)
        write_container(path, KIND, FORMAT_VERSION if weighed else 1, content, tensors)

    @staticmethod
    def read_specs(path: str | Path) -> tuple[ModelSpec, ModelSpec]:
        """(source, target) from the header alone: moments can be larger than memory."""
        content = read_content(path, KIND, FORMAT_VERSION)
        return spec_from_json(content.get("source", {})), spec_from_json(content.get("target", {}))

    @staticmethod
    def load(path: str | Path) -> MomentSet:
        """Raises FormatError when the file is truncated, edited, of another version or of another
        kind, or weighs errors by the measure of earlier releases.
        """
        content, tensors = read_container(path, KIND, FORMAT_VERSION)
        if any(name.endswith(".metric") for name in tensors):
            raise FormatError(
                f"{path} was weighed by an earlier release, which summed up other costs of an "
                f"error under the same name; calibrate again with the same --weighting."
            )
        parts = []
        try:
            for number, entry in enumerate(content["parts"]):
                a, b, c, d, e = (tensors[f"{number}.{name}"] for name in _NAMES)
                parts.append(
                    MomentPart(
                        slices=slices_from_json(entry["slices"]),
                        targets=slices_from_json(entry["targets"]),
                        moments=Moments(a, b, c, d, e, entry["count"]),
                        cost=tensors.get(f"{number}.cost"),
                    )
                )
            table, sinks = native_from_tensors(tensors, content["sinks"])
            return MomentSet(
                **pair_from_json(content),
                parts=tuple(parts),
                record=content["record"],
                token_table=table,
                sinks=sinks,
            )
        except (KeyError, TypeError) as error:
            raise FormatError(
                f"{path}: the moments are incomplete ({error}); calibrate again."
            ) from error


_NAMES = ("gram", "cross", "source_sum", "target_sum", "target_square")
