"""Work in the background that stands still."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from trtllm_kvmap.calibrate.quiet import Quiet


def test_a_rest_longer_than_a_lock_can_wait_is_a_rest() -> None:
    """Of a share of next to nothing: its thread must live, for close() waits for it."""
    quiet = Quiet()
    with ThreadPoolExecutor(1) as worker:
        resting = worker.submit(quiet.rest, 1e300)
        wait([resting], 0.1)
        still = not resting.done()
        quiet.end()
        resting.result()
    assert still
