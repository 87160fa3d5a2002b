"""Evidence written down by hand that proves a map: what evaluate attaches, without a run."""

from __future__ import annotations

from typing import Any

from trtllm_kvmap.artifact.evidence import CONTROLS
from trtllm_kvmap.artifact.kvmap import KvMap

DIGEST = "5e" * 32  # of no map


def interval(value: float, reach: float = 0.05) -> dict[str, float]:
    return {"value": value, "low": value - reach, "high": value + reach}


def whole_evidence(gap: float = 0.5, **changed: Any) -> dict[str, Any]:
    """Of a report in nll whose source alone has 2.4 nats and whose target has 1.8."""
    found = {
        "config": {
            "metric": "nll",
            "N": 32,
            "S": 1,
            "context_tokens": {"longest": 1000},
            "map_digest": DIGEST,
        },
        "arms": {"source": {"nll": interval(2.4)}, "target": {"nll": interval(1.8)}},
        "gap_recovered": interval(gap),
        "perplexity_ratio": interval(1.1),
        "controls": dict.fromkeys(CONTROLS, "passed"),
    }
    return found | changed


def without_a_gap() -> dict[str, Any]:
    """The same of a source that is the better model: there is no gap to recover."""
    return whole_evidence(
        gap_recovered=dict.fromkeys(("value", "low", "high")),
        arms={"source": {"nll": interval(5.58)}, "target": {"nll": interval(5.79)}},
    )


def vouched(kvmap: KvMap, evidence: Any = None) -> KvMap:
    """``kvmap`` with ``evidence`` (None: whole_evidence) that names it, as evaluate attaches it;
    evidence that is too damaged to name anything is taken as it is.
    """
    found = whole_evidence() if evidence is None else evidence
    if isinstance(found.get("config"), dict):
        found = {**found, "config": {**found["config"], "map_digest": kvmap.map_digest()}}
    return kvmap.with_evidence(found)
