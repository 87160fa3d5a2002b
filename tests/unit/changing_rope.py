"""Options of random_models.write_model whose RoPE frequencies change at 32 tokens."""

from __future__ import annotations

import pytest

DYNAMIC = {"rope": {"rope_type": "dynamic", "factor": 4.0}, "max_positions": 32}
LONGROPE = {
    "rope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "max_positions": 128,
}
LENGTH_DEPENDENT = [pytest.param(DYNAMIC, id="dynamic"), pytest.param(LONGROPE, id="longrope")]
