"""What the settings of trtllm_smoke.py's engines name: an operator's module, at its smallest.

Imported by the engine's process; the smoke check runs engine and caller in one.
"""

from __future__ import annotations

from typing import Any

from trtllm_kvmap.inject.connector.blocks import InProcessBlocks
from trtllm_kvmap.inject.connector.status import HandoffStatus
from trtllm_kvmap.inject.trtllm.connector import KvExportScheduler, KvExportWorker, KvMapWorker
from trtllm_kvmap.inject.trtllm.export import WantedExports
from trtllm_kvmap.inject.trtllm.scheduler import KvMapScheduler

__all__ = ["BLOCKS", "EXPORTS", "STATUSES", "KvExportScheduler", "KvExportWorker", "KvMapWorker"]

BLOCKS = InProcessBlocks()
EXPORTS = WantedExports()
STATUSES: list[HandoffStatus] = []


class ReportingScheduler(KvMapScheduler):
    """Keeps every status where the caller finds it."""

    def report(self, request: Any, status: HandoffStatus) -> None:
        STATUSES.append(status)
