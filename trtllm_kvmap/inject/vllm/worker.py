"""The worker's half in vLLM's terms."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.inject.connector.checks import require_host
from trtllm_kvmap.inject.connector.config import ConnectorConfig, import_object
from trtllm_kvmap.inject.connector.export import read_out
from trtllm_kvmap.inject.connector.worker import HandoffWorker
from trtllm_kvmap.inject.vllm.host import describe_host
from trtllm_kvmap.inject.vllm.layout import is_proven, view_pool
from trtllm_kvmap.inject.vllm.scheduler import StepOrders, StepReport
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import read_fingerprint


class VllmWorker:
    """Loads and exports between the source's blocks and vLLM's pool."""

    def __init__(self, config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._exports = import_object(config.exports) if config.exports else None
        self._kvmap, self._handoffs = None, None
        self._pool: KvPool | None = None
        self._report = StepReport()
        if config.blocks:
            self._kvmap, _ = config.load_map()
            fingerprint = read_fingerprint(vllm_config.model_config.model)
            self._kvmap.target_fingerprint.require(fingerprint, "target")
            self._handoffs = HandoffWorker(
                self._kvmap, import_object(config.blocks), config.backend
            )

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's pool. Raises MismatchError when mapped KV cannot go into it."""
        if self._pool is not None:
            raise MismatchError(
                "vLLM keeps one connector for all engines of a process, and this one serves "
                "another engine already; shut that one down first, or run each in its own process."
            )
        pool = view_pool(kv_caches)
        layers = self._vllm_config.compilation_config.static_forward_context
        # vLLM names the instruction set when it first prepares a batch; before, it is the default.
        isa = {str(getattr(layers[name], "isa", "vec")) for name in kv_caches}
        proven = all(is_proven(pool, name) for name in isa)
        report = describe_host(self._vllm_config, self._kv_cache_config, layout_proven=proven)
        require_host(report, self._kvmap)
        self._pool = pool

    def load(self, orders: StepOrders) -> None:
        """Before the forward pass."""
        if self._handoffs is not None and orders.loads:
            self._report = StepReport(self._handoffs.load_all(orders.loads, self._registered()))

    def export(self, orders: StepOrders) -> None:
        """After the forward pass."""
        for order in orders.exports:
            if self._exports is not None:
                self._exports.put(order.name, read_out(self._registered(), order))

    def failed_blocks(self) -> set[int]:
        return {block for load in self._report.failed for block in load.block_ids}

    def take_report(self) -> StepReport | None:
        report, self._report = self._report, StepReport()
        return report if report.failed else None

    def _registered(self) -> KvPool:
        if self._pool is None:
            raise MismatchError("vLLM asks for loads before it has registered its pool.")
        return self._pool
