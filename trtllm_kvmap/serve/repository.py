"""Writes a Triton model repository, for one lane."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_kvmap.artifact.evidence import require_proven
from trtllm_kvmap.artifact.kvmap import KvMap, read_map
from trtllm_kvmap.artifact.whole import require_writable
from trtllm_kvmap.calibrate.traffic import require_steady_rope
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.routing.speeds import Speeds
from trtllm_kvmap.decode.routing.vouched import RoutingPolicy, objection_to
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import describe_model, require_described
from trtllm_kvmap.serve.lanes.hf import hf_files
from trtllm_kvmap.serve.lanes.trtllm import trtllm_files
from trtllm_kvmap.serve.policy import require_window
from trtllm_kvmap.serve.settings import ServeConfig, Served

# What each lane's repository consists of: path inside it -> text.
LANES: dict[str, Callable[[Served], dict[str, str]]] = {"hf": hf_files, "trtllm": trtllm_files}


def write_repository(
    out: Path,
    kvmap: Path,
    source: str,
    target: str,
    config: ServeConfig,
    *,
    lane: str = "hf",
    allow_unproven: bool = False,
    speeds: Speeds | None = None,
) -> list[Path]:
    """Write the repository ``out``, a new or empty folder, whole or not at all; returns its files.

    With measured ``speeds`` each request is routed by them (serve.policy.Routed).

    Raises InputError for a lane or folder that cannot be, for speeds of another repair window, a
    map that routing would never choose, a guard that could judge nothing or models whose traffic
    cannot be counted, and what KvMap.load raises. The map must fit both models as far as that shows
    without their weights (MismatchError); the weights themselves are compared when the server has
    loaded them.
    """
    if lane not in LANES:
        raise InputError(f"There is no lane {lane!r}; there are {', '.join(LANES)}.")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"{out} is not an empty folder; give the name of a new one.")
    require_traffic_folder(config.traffic)
    loaded, map_digest = read_map(kvmap)
    if not allow_unproven:
        require_proven(kvmap, loaded.evidence, map_digest)
    require_described(loaded, describe_model(source), describe_model(target))
    if loaded.guard is not None and lane == "hf":  # no other lane asks it
        require_judging(loaded.guard, config)
    if speeds is not None:
        require_routable(loaded.evidence, map_digest, speeds, config, lane)
    if config.traffic:
        require_countable(loaded, lane)
        config = replace(config, traffic=str(Path(config.traffic).resolve()))
    files = LANES[lane](
        Served(
            kvmap=str(kvmap.resolve()),
            source=_absolute(source),
            target=_absolute(target),
            mapper_id=kvmap.name.removesuffix(".safetensors").removesuffix(".kvmap"),
            allow_unproven=allow_unproven,
            config=config,
            speeds=speeds,
        )
    )
    if out.is_dir():
        out.rmdir()
    require_writable(out)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        whole = Path(folder) / "repository"
        for path, text in files.items():
            (whole / path).parent.mkdir(parents=True, exist_ok=True)
            (whole / path).write_text(text, encoding="utf-8")
        shutil.move(whole, out)
    return [out / path for path in files]


def require_judging(guard: Any, config: ServeConfig) -> None:
    """Raise FormatError for a map's ``guard`` that cannot be read, and InputError when hand-overs
    show it too little to judge.
    """
    Guard.from_json(guard)
    if config.repair_window < 2:
        raise InputError(
            f"The map carries a guard, which judges a hand-over by at least 2 repaired tokens; the "
            f"repository repairs {config.repair_window}, so none would stand. Give the "
            f"--repair-window that the guard was set with."
        )


def require_routable(
    evidence: dict[str, Any] | None,
    map_digest: str | None,
    speeds: Speeds,
    config: ServeConfig,
    lane: str,
) -> None:
    """Raise InputError when requests cannot be routed by ``speeds``."""
    if lane != "hf":
        raise InputError(f"The lane {lane} routes no request; leave --speeds out.")
    require_window(speeds, config.repair_window)
    window = config.repair_window
    objection = objection_to(evidence, map_digest, 1, window, "up", RoutingPolicy())
    if objection:
        raise InputError(
            f"With --speeds a map is used where its evidence vouches for it, and here that would "
            f"be nowhere: {objection}. Evaluate it again, or leave --speeds out."
        )


def require_traffic_folder(traffic: str) -> None:
    """Raise InputError when ``traffic`` (empty: none) is, or lies in, what is no folder."""
    path = Path(traffic).resolve()
    there = next(each for each in (path, *path.parents) if each.exists())
    if traffic and not there.is_dir():
        raise InputError(
            f"The --traffic {traffic} needs a folder, and {there} is none; give another."
        )


def require_countable(kvmap: KvMap, lane: str) -> None:
    """Raise InputError when the traffic of the map's models cannot be counted."""
    if lane != "hf":
        raise InputError(f"The lane {lane} counts no traffic; leave --traffic out.")
    require_steady_rope(kvmap.source, kvmap.target)


def _absolute(model: str) -> str:
    """A folder as an absolute path; a hub id as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model
