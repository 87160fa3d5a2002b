"""What rounding the weights costs the best matrices (run it through bench.py fits)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fit_pair import Bench
from fit_ways import BOTH

from trtllm_kvmap.fit import FitConfig, fit


def storage(bench: Bench) -> list[dict[str, Any]]:
    """The matrices of the way `by sensitivity, keys and values`, one row a type of number."""
    config = FitConfig(**bench.best("sensitivity", BOTH).fitted["config"])
    rows = []
    for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn"):
        kvmap = fit(bench.moments["sensitivity"], replace(config, dtype=dtype))
        judged = bench.judged(kvmap, "report")
        rows.append({"dtype": dtype, **bench.figures(judged)})
    return rows
