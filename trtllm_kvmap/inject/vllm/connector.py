"""KvMapConnector: the one class that vLLM asks for, in either of its two roles."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from trtllm_kvmap.inject.connector.config import ConnectorConfig
from trtllm_kvmap.inject.vllm.scheduler import StepOrders, VllmScheduler
from trtllm_kvmap.inject.vllm.worker import VllmWorker


class KvMapConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Every method is vLLM's; see KVConnectorBase_V1 for when each is called. Only the half of its
    own role exists in an instance.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = ConnectorConfig.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = VllmScheduler(config, vllm_config.cache_config.block_size)
        else:
            self._worker = VllmWorker(config, vllm_config, kv_cache_config)

    # --- The scheduler's role ---

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._scheduler.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._scheduler.take_orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.report(connector_output.kv_connector_worker_meta)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request)

    # --- The worker's role ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Every layer was loaded on this stream by start_load_kv."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Exports wait for the whole forward pass."""

    def wait_for_save(self) -> None:
        self._worker.export(self._get_connector_metadata())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_report()
