"""Matrices of low rank by what is cut away (run it through bench.py fits)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fit_pair import Bench

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.evaluate.bootstrap import figure
from trtllm_kvmap.fit import FitConfig, fit

CUTS, RANKS, WIDER_RANKS = ("plain", "data", "output"), (8, 12, 16, 24), (32, 48)
FULL = (
    FitConfig(scope="pooled", k=3, ridge=1e-6, fields="both"),
    FitConfig(scope="slice", n=12, ridge=1e-6, fields="both"),
)


def low_ranks(bench: Bench, moments: MomentSet) -> list[dict[str, Any]]:
    """Every cut of every rank, for all heads of a layer together and for each head apart. ``gain``
    and ``nll_gain`` (nats saved) are paired with cutting plainly; ``chosen`` marks the cut with the
    lowest loss on the selection documents, as `fit --cut ... --cut ...` would choose.
    """
    wider = WIDER_RANKS if bench.target.spec.head_dim > max(WIDER_RANKS) else ()
    return [
        row
        for config in FULL
        for rank in (*RANKS, *wider)
        for row in _cuts(bench, moments, config, rank)
    ]


def _cuts(bench: Bench, moments: MomentSet, config: FitConfig, rank: int) -> list[dict[str, Any]]:
    maps = {cut: fit(moments, replace(config, rank=rank, cut=cut)) for cut in CUTS}
    selection = {cut: float(bench.judged(kvmap, "selection").nll[0]) for cut, kvmap in maps.items()}
    judged = {cut: bench.judged(kvmap, "report") for cut, kvmap in maps.items()}
    return [
        {
            "scope": config.scope,
            "rank": rank,
            "cut": cut,
            "chosen": cut == min(selection, key=selection.__getitem__),
            "selection_nll": selection[cut],
            **bench.figures(judged[cut]),
            "gain": bench.gain(judged[cut], judged["plain"]),
            "nll_gain": figure(judged["plain"].nll - judged[cut].nll).to_json(),
        }
        for cut in CUTS
    ]
