"""Work in the background that stands still while answers are made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Quiet:
    """What the threads that answer and the one that works in the background agree by."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answering: list[int] = []  # the thread of every open block
        self._ended = False
        self.stood_still = 0.0  # seconds spent in wait()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While such a block is open, on any thread, wait() does not return. Opening one never
        waits.
        """
        here = threading.get_ident()
        with self._changed:
            self._answering.append(here)
        try:
            yield
        finally:
            with self._changed:
                self._answering.remove(here)
                self._changed.notify_all()

    @property
    def asked_for_here(self) -> bool:
        """Whether this thread has opened a block that is still open."""
        with self._changed:
            return threading.get_ident() in self._answering

    def wait(self) -> None:
        """Stand still until no answer is being made."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._answering)
        self.stood_still += time.monotonic() - began

    def rest(self, seconds: float) -> None:
        """Stand still for so long, whether or not answers are made."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, min(seconds, threading.TIMEOUT_MAX))

    def end(self) -> None:
        """Nothing waits from now on."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
