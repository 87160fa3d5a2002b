"""Calibration over several processes: each reads its share of the documents, the sums add up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from trtllm_kvmap.calibrate.accumulate import PartSums


def place() -> tuple[int, int]:
    """(rank, number of ranks) of this process; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def add_over_ranks(sums: list[PartSums]) -> None:
    """Every rank ends with the sum of all. Nothing happens without a process group."""
    if place()[1] == 1:
        return
    for part in sums:
        for tensor in part.tensors():
            dist.all_reduce(tensor)
        count = torch.tensor(part.count)
        dist.all_reduce(count)
        part.count = int(count)


@contextmanager
def process_group() -> Iterator[None]:
    """Join the group that torchrun describes in the environment (gloo), and leave it at the end.
    Does nothing in a process that torchrun did not start.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
