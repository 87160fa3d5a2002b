"""What the connector's settings name in these tests: source blocks and exports of this process."""

from __future__ import annotations

from connector_world import Breakable


class AwaitingBlocks(Breakable):
    """Blocks whose hand-overs can be known before they are offered."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: set[str] = set()

    def salts(self) -> tuple[str, ...]:
        return (*super().salts(), *self.awaited)


BLOCKS = AwaitingBlocks()
EXPORTS = None  # a WantedExports, once the shell can be imported
RECEIVED = None  # blocks that came over an exchange, for the tests that make one
