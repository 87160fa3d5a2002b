"""Fit: moments become a KvMap. Every scope is a sub-block solve of the same moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.fit.blocks import FittedGroup
from trtllm_kvmap.fit.centred import CentredPart, describe
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.fit.copy import fit_copy
from trtllm_kvmap.fit.head import fit_head
from trtllm_kvmap.fit.pooled import fit_pooled
from trtllm_kvmap.fit.slice import fit_slice
from trtllm_kvmap.spec.slices import FIELDS, Field, Slice

__all__ = ["SCOPES", "FitConfig", "fit"]

SCOPES: dict[str, Callable[[CentredPart, FitConfig], Iterator[FittedGroup]]] = {
    "copy": fit_copy,
    "head": fit_head,
    "pooled": fit_pooled,
    "slice": fit_slice,
}


def fit(moments: MomentSet | Iterable[MomentSet], config: FitConfig) -> KvMap:
    """The map of ``config`` from one set of moments, or from the shards of one pair that together
    cover the target's layers (an iterable that loads each when its turn comes keeps one in memory).

    ``KvMap.fitted`` records the configuration, the training R2 (mean and worst over heads, mean per
    layer, for keys and values) and where the moments came from. Equal input gives equal bytes.
    Raises InputError for an option that cannot be met, MismatchError for a pair or moments that the
    scope does not fit, NumericsError for moments no answer can be trusted from.
    """
    shards = [moments] if isinstance(moments, MomentSet) else moments
    first: MomentSet | None = None
    fitted: list[FittedGroup] = []
    records: list[dict[str, Any]] = []
    covered: set[Slice] = set()
    for shard in shards:
        first = first or replace(shard, parts=())  # not the moments themselves: they are large
        _require_same_pair(first, shard)
        targets = {t for part in shard.parts for t in part.targets}
        _require_apart(targets & covered)
        covered |= targets
        for part in shard.parts:
            centred = CentredPart(part, shard.source, shard.target)
            fitted += SCOPES[config.scope](centred, config)
        records.append(shard.record)
    if first is None:
        raise InputError("No moments were given; give at least one moments file.")
    _require_every_layer(first, fitted)
    fitted.sort(key=lambda f: (f.group.layer, f.group.field, f.group.heads))
    groups = tuple(f.group for f in fitted)
    reads_tokens = any(s.origin == "target" for group in groups for s in group.slices)
    return KvMap(
        source=first.source,
        target=first.target,
        source_fingerprint=first.source_fingerprint,
        target_fingerprint=first.target_fingerprint,
        scope=config.scope,
        groups=groups,
        fitted={
            "config": asdict(config),
            "r2": {field: _r2_summary(fitted, field) for field in FIELDS},
            "moments": records,
        },
        token_table=first.token_table if reads_tokens else None,
        sinks=first.sinks,
    )


def _r2_summary(fitted: list[FittedGroup], field: Field) -> dict[str, Any]:
    by_layer: dict[int, list[float]] = {}
    for f in fitted:
        if f.group.field == field:
            by_layer.setdefault(f.group.layer, []).extend(f.r2)
    heads = [r2 for layer in by_layer.values() for r2 in layer]
    return {
        "mean": sum(heads) / len(heads),
        "worst": min(heads),
        "per_layer": [sum(layer) / len(layer) for layer in by_layer.values()],
    }


def _require_same_pair(first: MomentSet, shard: MomentSet) -> None:
    pairs = [(m.source_fingerprint, m.target_fingerprint) for m in (first, shard)]
    if pairs[0] != pairs[1]:
        raise MismatchError(
            "The moments files come from different models; give the shards of one pair."
        )


def _require_apart(twice: set[Slice]) -> None:
    if twice:
        raise MismatchError(
            f"Two of the moments files hold the same columns ({describe(list(twice))}); several "
            f"files are fitted together where each has a layer band of its own. Give one of the "
            f"two, or add them up before: (MomentSet.load(a) + MomentSet.load(b)).save(c)."
        )


def _require_every_layer(moments: MomentSet, fitted: list[FittedGroup]) -> None:
    found = {(f.group.field, f.group.layer) for f in fitted}
    missing = sorted(
        {
            layer
            for field in FIELDS
            for layer in range(moments.target.num_layers)
            if (field, layer) not in found
        }
    )
    if missing:
        raise MismatchError(
            f"The moments do not cover target layers {', '.join(map(str, missing))}; give the "
            f"moments files of every layer band."
        )
