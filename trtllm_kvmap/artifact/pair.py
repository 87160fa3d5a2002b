"""The two models of a file, as both formats write them into their headers."""

from __future__ import annotations

from typing import Any, Protocol, TypedDict

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.record import spec_from_json, spec_to_json
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.spec.model import ModelSpec


class HasPair(Protocol):
    """Whatever knows its source and its target: a KvMap, a MomentSet."""

    @property
    def source(self) -> ModelSpec: ...
    @property
    def target(self) -> ModelSpec: ...
    @property
    def source_fingerprint(self) -> Fingerprint: ...
    @property
    def target_fingerprint(self) -> Fingerprint: ...


class Pair(TypedDict):
    """The same four, to build one of them from."""

    source: ModelSpec
    target: ModelSpec
    source_fingerprint: Fingerprint
    target_fingerprint: Fingerprint


def require_pair(
    holder: HasPair, source: Fingerprint, target: Fingerprint, what: str = "The map was fitted"
) -> None:
    """Raise MismatchError unless these are the two models of ``holder``, saying so when they are
    but the other way round. ``what`` begins the sentence: what was done for them.
    """
    theirs = holder.source_fingerprint, holder.target_fingerprint
    if theirs == (target, source) and source != target:
        raise MismatchError(
            f"Source and target look swapped: {what[0].lower()}{what[1:]} from {holder.source.name}"
            f" (the source) to {holder.target.name} (the target), and these two were given the "
            f"other way round. Exchange them, or give a file that leads the other way."
        )
    theirs[0].require(source, "source", what)
    theirs[1].require(target, "target", what)


def pair_to_json(holder: HasPair) -> dict[str, Any]:
    return {
        "source": spec_to_json(holder.source),
        "target": spec_to_json(holder.target),
        "source_fingerprint": holder.source_fingerprint.to_json(),
        "target_fingerprint": holder.target_fingerprint.to_json(),
    }


def pair_from_json(content: dict[str, Any]) -> Pair:
    """Raises KeyError for a missing entry, FormatError for a spec that cannot be read."""
    return Pair(
        source=spec_from_json(content["source"]),
        target=spec_from_json(content["target"]),
        source_fingerprint=Fingerprint.from_json(content["source_fingerprint"]),
        target_fingerprint=Fingerprint.from_json(content["target_fingerprint"]),
    )
