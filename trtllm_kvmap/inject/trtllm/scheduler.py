"""The scheduler's half in TensorRT-LLM's terms. Every method is the engine's."""

from __future__ import annotations

import json
import logging
from typing import Any

from trtllm_kvmap.inject.connector.orders import LoadOrder
from trtllm_kvmap.inject.connector.scheduler import HandoffScheduler, RequestView
from trtllm_kvmap.inject.connector.status import HandoffStatus
from trtllm_kvmap.inject.trtllm.host import KvCacheConnectorScheduler, salt_of
from trtllm_kvmap.inject.trtllm.process import this_target

log = logging.getLogger(__name__)


class KvMapScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """Offers mapped tokens to the requests that carry the ``cache_salt`` of a hand-over.

    The engine has no hook that sets a salt: whoever sends the request must, with the salt that
    offering the blocks returned. A request without it is a plain one; it has no other way to ask.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        target = this_target()
        self._blocks = target.blocks
        self._handoffs = HandoffScheduler(
            target.kvmap,
            target.digest,
            target.blocks,
            tokens_per_block=llm_args.kv_cache_config.tokens_per_block,
            first_tokens=target.config.first_tokens,
            repair_window=target.config.repair_window,
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Never asynchronous: the blocks are in hand, and their map runs on the forward stream."""
        tokens = request.get_tokens(0)
        salt = salt_of(request, self._blocks.salts())
        view = RequestView(
            request_id=str(request.request_id),
            token_ids=tokens,
            salt=salt,
            handoff=self._blocks.asked_by(salt),
        )
        matched = self._handoffs.match(view, num_computed_tokens)
        refusal = self._blocks.refusal(salt)
        if request.lora_task_id is not None:
            refusal = "it asks for a LoRA adapter, and the map was fitted for the model without one"
        if refusal:
            self._handoffs.declined(view.request_id, refusal)
            matched = 0
        return matched, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The same blocks come with build_connector_meta, where later ones come as well."""

    def build_connector_meta(self, scheduler_output: Any) -> tuple[LoadOrder, ...]:
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            self._handoffs.allocated(str(data.request_id), data.new_block_ids)
        return self._handoffs.take_orders()

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        status = self._handoffs.finished(str(request.request_id), request.get_tokens(0))
        if status is not None:
            self.report(request, status)
        return False

    def report(self, request: Any, status: HandoffStatus) -> None:
        """What became of a request's hand-over. The engine's response has no place for it: it is
        logged, and a subclass may send it elsewhere.
        """
        log.info("request %s: %s", request.request_id, json.dumps(status.to_json()))
