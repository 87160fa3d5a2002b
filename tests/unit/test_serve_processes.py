"""Two workers that cannot start: the front says why, as they would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from handmade_maps import random_map

from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.serve.processes.front import WorkerPair
from trtllm_kvmap.serve.processes.work import PairSettings


def test_a_worker_that_cannot_start_says_why(
    tmp_path: Path, random_model: Callable[..., LoadedModel]
) -> None:
    source, target = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    file, empty = tmp_path / "pair.kvmap.safetensors", tmp_path / "empty"
    random_map(source, target).save(file)
    empty.mkdir()
    settings = PairSettings(str(empty), str(empty), str(file), transport="shared_memory")
    with WorkerPair(settings) as pair:
        with pytest.raises(UnavailableError, match=r"A worker could not start.* unproven"):
            pair.ask(range(3, 80), 1)
        with pytest.raises(UnavailableError, match=r"could not start: .*empty"):
            pair.source.start()
        assert pair.source.pid is None
