"""What this machine offers, for estimates made before long work starts, and how to say it."""

from __future__ import annotations

import os
import time

import torch


def total_memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def matmul_rate(dtype: torch.dtype = torch.float32, seconds: float = 0.25) -> float:
    """FLOP/s of a square CPU matmul on torch's threads: the best one in about ``seconds``."""
    size = 1024
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    c = a @ b
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def say_bytes(count: float) -> str:
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def say_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.3g} hours"
