"""`trtllm-kvmap inspect`"""

from __future__ import annotations

from typing import Any

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.record import spec_to_json
from trtllm_kvmap.cli.app import console, verb, write_json
from trtllm_kvmap.cli.flags import JsonOption, KvMapArgument


@verb
def inspect(
    kvmap: KvMapArgument,
    json: JsonOption = None,
) -> None:
    """Print what a map is: its pair, scope, size, fit, and the evidence it carries."""
    description = describe(KvMap.load(kvmap, allow_unproven=True))
    console.print_json(data=description)
    write_json(json, description)


def describe(kvmap: KvMap) -> dict[str, Any]:
    slices = [len(group.slices) for group in kvmap.groups]
    return {
        "source": spec_to_json(kvmap.source),
        "target": spec_to_json(kvmap.target),
        "fingerprints": {
            "source": kvmap.source_fingerprint.to_json(),
            "target": kvmap.target_fingerprint.to_json(),
        },
        "scope": kvmap.scope,
        "parameters": kvmap.num_parameters,
        "slices_per_group": {"fewest": min(slices), "most": max(slices)},
        "reads_token_ids": kvmap.reads_token_ids,
        "sinks": [list(entry.token_ids) for entry in kvmap.sinks],
        "fitted": kvmap.fitted,
        "evidence": kvmap.evidence,
        "guard": kvmap.guard,
    }
