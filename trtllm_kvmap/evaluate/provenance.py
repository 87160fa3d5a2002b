"""Which map a report or a diagnosis is of."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trtllm_kvmap.artifact.kvmap import KvMap


def provenance(kvmap: KvMap) -> dict[str, Any]:
    """The entries ``fingerprints`` and ``kvmap`` of a report."""
    return {
        "fingerprints": {
            "source": kvmap.source_fingerprint.to_json(),
            "target": kvmap.target_fingerprint.to_json(),
        },
        "kvmap": {
            "scope": kvmap.scope,
            "parameters": kvmap.num_parameters,
            "fitted": kvmap.fitted,
        },
    }


def name_of(fingerprints: dict[str, Any], kvmap: dict[str, Any]) -> str:
    """16 hex digits that name the two models and how the map between them was fitted: the same
    before and after the map earned evidence, and after a round through JSON.
    """
    said = json.dumps([fingerprints, kvmap], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]
