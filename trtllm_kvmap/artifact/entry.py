"""One map of a registry, as its header describes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trtllm_kvmap.artifact.evidence import unproven
from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.pair import pair_from_json
from trtllm_kvmap.errors import FormatError
from trtllm_kvmap.spec.model import ModelSpec

# Control characters, line ends and halves of characters: no terminal shows them, and a list of
# names would get lines that nobody wrote. And what turns the direction of writing (Unicode's
# Bidi_Control): it shows a name in another order than it has.
UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """``path`` is relative to the registry; ``size`` in bytes; ``digest`` and ``map_digest`` (which
    the evidence must name) are what the file says of itself, proven only when it is loaded;
    ``signed``: a signature lies beside it.
    """

    path: str
    size: int
    digest: str
    source: ModelSpec
    target: ModelSpec
    source_fingerprint: Fingerprint
    target_fingerprint: Fingerprint
    scope: str
    evidence: dict[str, Any] | None
    map_digest: str | None
    signed: bool

    @property
    def proven(self) -> bool:
        return not unproven(self.evidence, self.map_digest)

    @property
    def gap_recovered(self) -> float | None:
        """Of the evidence, in whichever metric it was taken; None for a map that is not proven, so
        that no claim ranks it.
        """
        if self.evidence is None or not self.proven:
            return None
        return float(self.evidence["gap_recovered"]["value"])

    def fits(self, source: Fingerprint, target: Fingerprint) -> bool:
        return (self.source_fingerprint, self.target_fingerprint) == (source, target)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "size": self.size,
            "digest": self.digest,
            "source": self.source.name,
            "target": self.target.name,
            "scope": self.scope,
            "proven": self.proven,
            "gap_recovered": self.gap_recovered,
            "signed": self.signed,
        }


@dataclass(frozen=True, slots=True)
class Unusable:
    """A file of a registry that is no map, or no longer one, and why."""

    path: str
    reason: str


def entry_from_content(
    path: str, size: int, digest: str, content: dict[str, Any], *, signed: bool
) -> Entry:
    """Raises FormatError for a content that describes no map."""
    try:
        evidence = content["evidence"]
        if evidence is not None and not isinstance(evidence, dict):
            raise TypeError("its evidence is no object")
        pair, scope = pair_from_json(content), str(content["scope"])
        names = pair["source"].name, pair["target"].name, scope
        if UNPRINTABLE.search("".join(names)):
            raise ValueError(f"its names are {names}")
        return Entry(
            path=path,
            size=size,
            digest=digest,
            **pair,
            scope=scope,
            evidence=evidence,
            map_digest=content.get("map_digest"),
            signed=signed,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: the map is incomplete ({error}); fit it again.") from error
