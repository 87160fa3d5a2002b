"""Two gloo processes against one, within float64 rounding."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.distributed import place, process_group
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.models import LoadedModel

DOCUMENTS = [
    [1, *np.random.default_rng(seed).integers(2, 60, size=length).tolist()]
    for seed, length in enumerate([30, 9, 25, 40, 12])
]
CONFIG = CalibrationConfig(checkpoint_every=1)


def one_rank(rank: int, port: int, pair: list[LoadedModel], out: Path) -> None:
    """What torchrun starts, with the environment that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    calls: list[tuple[int, int]] = []
    with process_group():
        assert place() == (rank, 2)
        moments = calibrate(
            *pair, DOCUMENTS, CONFIG, out, on_document=lambda *call: calls.append(call)
        )
    assert place() == (0, 1)
    assert calls[-1] == ((3, 3), (2, 2))[rank]
    moments.save(out.with_name(f"returned-{rank}"))


def test_two_processes_equal_one(random_model: Callable[..., LoadedModel], tmp_path: Path) -> None:
    pair = [random_model(layers=2, seed=1), random_model(layers=3, seed=2)]
    one = calibrate(*pair, DOCUMENTS, CONFIG, tmp_path / "one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Forked, because a spawned process would import everything again, which takes longest.
    mp.start_processes(one_rank, (port, pair, tmp_path / "two"), nprocs=2, start_method="fork")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "returned-0", "returned-1", "two"]
    two = MomentSet.load(tmp_path / "two")
    assert two.record == one.record
    assert [entry.token_ids for entry in two.sinks] == [(1,)]
    for a, b in zip(two.parts, one.parts, strict=True):
        assert (a.slices, a.targets) == (b.slices, b.targets)
        assert a.moments.count == b.moments.count == sum(len(d) - 4 for d in DOCUMENTS)
        for x, y in zip(a.moments.tensors(), b.moments.tensors(), strict=True):
            scale = float(y.abs().max())
            torch.testing.assert_close(x, y, rtol=0, atol=1e-14 * scale)
    assert (tmp_path / "returned-0").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "returned-1").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_process_that_torchrun_did_not_start_has_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group():
        assert place() == (0, 1)
