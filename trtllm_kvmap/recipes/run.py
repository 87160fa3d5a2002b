"""Every recipe by name, its config file beside it, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.recipes import (
    copy_repair_speculate,
    lowrank_residual,
    per_head_controls,
    pooled_multiturn,
    ridge_k,
)
from trtllm_kvmap.recipes.outcome import Outcome
from trtllm_kvmap.recipes.pair import OwnModels, Pair, PairConfig, load_pair, read_texts
from trtllm_kvmap.recipes.steps import Progress
from trtllm_kvmap.recipes.strict import build, merged, read_yaml

RECIPES: dict[str, tuple[type[PairConfig], Callable[[Any, Pair, Progress], Outcome]]] = {
    "copy-repair-speculate": (copy_repair_speculate.Config, copy_repair_speculate.run),
    "ridge-k": (ridge_k.Config, ridge_k.run),
    "lowrank-residual": (lowrank_residual.Config, lowrank_residual.run),
    "per-head-controls": (per_head_controls.Config, per_head_controls.run),
    "pooled-multiturn": (pooled_multiturn.Config, pooled_multiturn.run),
}


def config_of(name: str, over: Mapping[str, Any] | None = None) -> PairConfig:
    """The config that ships with the recipe ``name``, with the values of ``over`` in place of its
    own. Raises InputError for an unknown recipe, key or type.
    """
    if name not in RECIPES:
        raise InputError(f"There is no recipe {name!r}; there are {', '.join(RECIPES)}.")
    shipped = read_yaml(Path(__file__).with_name(f"{name.replace('-', '_')}.yaml"))
    return build(RECIPES[name][0], merged(shipped, over or {}))


def run_recipe(
    name: str,
    out: Path,
    *,
    over: Mapping[str, Any] | None = None,
    own: OwnModels | None = None,
    on_progress: Progress | None = None,
) -> tuple[Outcome, list[Path]]:
    """Run it and write ``out``: recipe.json, and the map, report.json and report.html of every
    judged map. Raises as the stages it runs.
    """
    own = own or OwnModels()
    config = own.put_into(config_of(name, over))
    texts = read_texts(config, own.text)
    require_writable(out / "recipe.json")
    pair = load_pair(config, texts)
    outcome = RECIPES[name][1](config, pair, on_progress or (lambda stage, done, total: None))
    files = outcome.save(out, {"recipe": name, "config": asdict(config)})
    return outcome, files
