"""The scheduler's half in vLLM's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from trtllm_kvmap.inject.connector.config import ConnectorConfig, import_object
from trtllm_kvmap.inject.connector.export import ExportOrder, ExportScheduler
from trtllm_kvmap.inject.connector.orders import FailedLoad, LoadOrder
from trtllm_kvmap.inject.connector.scheduler import HandoffScheduler, RequestView


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the worker, once per step."""

    loads: tuple[LoadOrder, ...] = ()
    exports: tuple[ExportOrder, ...] = ()


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the worker back to the scheduler."""

    failed: tuple[FailedLoad, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        return StepReport((*self.failed, *getattr(other, "failed", ())))


class VllmScheduler:
    """Turns vLLM's calls into those of HandoffScheduler and ExportScheduler.

    A request asks with ``cache_salt`` alone, or also names the hand-over in
    ``kv_transfer_params={"handoff": salt}`` and is then told when it is not held;
    ``{"export": name}`` keeps the KV of its prompt.
    """

    def __init__(self, config: ConnectorConfig, tokens_per_block: int) -> None:
        self._exports = ExportScheduler(tokens_per_block) if config.exports else None
        self._handoffs: HandoffScheduler | None = None
        if config.blocks:
            kvmap, digest = config.load_map()
            self._handoffs = HandoffScheduler(
                kvmap,
                digest,
                import_object(config.blocks),
                tokens_per_block=tokens_per_block,
                first_tokens=config.first_tokens,
                repair_window=config.repair_window,
            )

    def match(self, request: Any, num_computed: int) -> int:
        if self._handoffs is None:
            return 0
        view = RequestView(
            request_id=request.request_id,
            token_ids=request.prompt_token_ids or (),
            salt=request.cache_salt,
            handoff=(request.kv_transfer_params or {}).get("handoff"),
        )
        matched = self._handoffs.match(view, num_computed)
        reason = _refusal(request)
        if reason:
            self._handoffs.declined(request.request_id, reason)
            return 0
        return matched

    def allocated(self, request: Any, block_ids: list[int]) -> None:
        """``block_ids`` are all blocks of the request so far."""
        if self._handoffs is not None:
            self._handoffs.allocated(request.request_id, block_ids)
        name = (request.kv_transfer_params or {}).get("export")
        if self._exports is not None and name and request.num_output_tokens == 0:
            self._exports.begin(request.request_id, name, request.prompt_token_ids)

    def take_orders(self, step: Any) -> StepOrders:
        """``step`` is vLLM's SchedulerOutput."""
        if self._exports is not None:
            self._note_progress(self._exports, step)
        return StepOrders(
            loads=self._handoffs.take_orders() if self._handoffs else (),
            exports=self._exports.take_orders() if self._exports else (),
        )

    def report(self, report: StepReport | None) -> None:
        for load in report.failed if report is not None else ():
            if self._handoffs is not None:
                self._handoffs.failed(load)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """What the request's output says under ``kv_transfer_params``; None for nothing."""
        if self._exports is not None:
            self._exports.forget(request.request_id)
        if self._handoffs is None:
            return None
        status = self._handoffs.finished(request.request_id, request.all_token_ids)
        return None if status is None else {"kvmap": status.to_json()}

    def _note_progress(self, exports: ExportScheduler, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            exports.allocated(new.req_id, new.block_ids[0])
            scheduled = step.num_scheduled_tokens[new.req_id]
            exports.computed(new.req_id, new.num_computed_tokens + scheduled)
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            exports.allocated(request_id, blocks[0] if blocks else ())
            scheduled = step.num_scheduled_tokens[request_id]
            exports.computed(request_id, cached.num_computed_tokens[index] + scheduled)


def _refusal(request: Any) -> str | None:
    """Why vLLM would not use what this request is offered, or must not."""
    if request.skip_reading_prefix_cache:
        return "vLLM reads no cache for this request (prompt_logprobs, or told so)"
    if request.lora_request is not None:
        return "it asks for a LoRA adapter, and the map was fitted for the model without one"
    return None
