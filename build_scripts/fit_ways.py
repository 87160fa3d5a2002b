"""The ways of fitting that bench.py fits compares: which rows weigh how much, which candidates, and
what is trained beside the best of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.refine.config import RefineConfig

RIDGES = (1e-6, 1e-4, 1e-2)
PLAIN = (
    FitGrid(scope=("head", "pooled"), k=(1, 2, 3), ridge=RIDGES),
    FitGrid(scope=("slice",), n=(4, 8), ridge=RIDGES, own_slices=False),
)
OWN = (FitGrid(scope=("slice",), n=(4, 8), ridge=RIDGES),)
BOTH = (FitGrid(scope=("slice",), n=(8, 12, 16), ridge=RIDGES, fields="both"),)
MLP = RefineConfig("mlp", hidden=256, steps=300)
RESIDUAL = RefineConfig("residual", steps=80, learning_rate=1e-3)
WEIGHTINGS = "uniform", "sensitivity", "attention"


@dataclass(frozen=True)
class Way:
    """One way of fitting: which moments, which candidates, and what is trained beside the best."""

    weighting: str
    grids: tuple[FitGrid, ...]
    refinement: RefineConfig | None = None


WAYS = {
    "plain ridge": Way("uniform", PLAIN),
    "own layer 0": Way("uniform", OWN),
    "keys and values": Way("uniform", BOTH),
    "by sensitivity": Way("sensitivity", PLAIN),
    "by sensitivity, keys and values": Way("sensitivity", BOTH),
    "by attention": Way("attention", PLAIN),
    "by attention, keys and values": Way("attention", BOTH),
    "plain ridge + residual": Way("uniform", PLAIN, RESIDUAL),
    "plain ridge + mlp": Way("uniform", PLAIN, MLP),
    "by sensitivity, keys and values + mlp": Way("sensitivity", BOTH, MLP),
    "by attention, keys and values + mlp": Way("attention", BOTH, MLP),
}
BASELINE = "plain ridge"
# Head-local ridge is the cheapest map, and fails on the first pair: less than the source alone.
FAILING = FitGrid(scope=("head",), k=(1, 2, 3), ridge=RIDGES)
