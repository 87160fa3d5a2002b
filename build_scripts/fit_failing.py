"""What an MLP recovers of a map that ridge fails on (run it through bench.py fits)."""

from __future__ import annotations

from typing import Any

from fit_pair import Bench
from fit_ways import FAILING, MLP

from trtllm_kvmap.evaluate.bootstrap import figure


def failing(bench: Bench) -> dict[str, Any]:
    """A map that ridge fails on, and what an MLP over the same slices recovers of the loss:
    of what lies between the ridge and the target itself.
    """
    ridge = bench.best("uniform", (FAILING,))
    both = {"ridge": ridge, "mlp": bench.refined(ridge, MLP)}
    judged = {name: bench.judged(kvmap, "report") for name, kvmap in both.items()}
    gaps = {name: bench.gap(each) for name, each in judged.items()}
    share = (gaps["mlp"] - gaps["ridge"]) / (1 - gaps["ridge"])
    return {
        "config": ridge.fitted["config"],
        **{name: bench.figures(each) for name, each in judged.items()},
        "recovered_of_what_ridge_loses": figure(share).to_json(),
    }
