"""What is kept in memory while there is room: the least recently used goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from trtllm_kvmap.errors import InputError

Value = TypeVar("Value")


class Resident(Generic[Value]):
    """At most ``capacity`` bytes of values (None: all of them), each made once while it stays.

    A value larger than the whole capacity is made and given, and not kept. Safe to share between
    threads; values are made one at a time.
    """

    def __init__(self, capacity: int | None) -> None:
        if capacity is not None and capacity < 0:
            raise InputError(f"The bytes to keep must not be negative, got {capacity}.")
        self.capacity = capacity
        self._held: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def keys(self) -> list[Hashable]:
        """What is kept, the least recently used first."""
        with self._lock:
            return list(self._held)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(size for _, size in self._held.values())

    def get(self, key: Hashable, make: Callable[[], tuple[Value, int]]) -> Value:
        """The value kept under ``key``, or the one that ``make`` returns with its size in bytes."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key][0]
            value, size = make()
            if self.capacity is None or size <= self.capacity:
                self._held[key] = value, size
                while self.capacity is not None and self.held_bytes > self.capacity:
                    self._held.popitem(last=False)
            return value
