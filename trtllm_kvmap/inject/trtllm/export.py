"""The source's connector: what a request has computed, copied out while its blocks are held."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from trtllm_kvmap.errors import InputError, KvMapError, MismatchError
from trtllm_kvmap.inject.connector.config import import_object
from trtllm_kvmap.inject.connector.export import Exported, ExportOrder, Exports, read_out
from trtllm_kvmap.inject.trtllm.admission import require_engine
from trtllm_kvmap.inject.trtllm.host import KvCacheConnectorScheduler, KvCacheConnectorWorker
from trtllm_kvmap.inject.trtllm.pool import view_pool
from trtllm_kvmap.inject.trtllm.process import read_config
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import read_spec
from trtllm_kvmap.spec.layout import BlockTable

log = logging.getLogger(__name__)


class WantedExports(Exports):
    """Exports of named prompts: a request of this engine has no parameters of its own, so what to
    keep is told by its tokens. Thread-safe.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wanted: dict[str, tuple[int, ...]] = {}
        self._orders: dict[int, ExportOrder] = {}
        self._wanting = threading.Lock()

    def want(self, name: str, token_ids: Sequence[int]) -> None:
        """Keep under ``name`` the KV of the next request to finish whose tokens begin with these:
        its prompt and its answer.
        """
        if not token_ids:
            raise InputError(f"The export {name!r} names no tokens; give the prompt's.")
        with self._wanting:
            self._wanted[name] = tuple(int(token) for token in token_ids)

    def order(
        self, request_id: int, token_ids: Sequence[int], block_ids: Sequence[int], size: int
    ) -> bool:
        """Whether this finished request is wanted; its blocks must then be held until take_order's
        caller has read them. ``token_ids`` are those with KV.
        """
        ids = tuple(int(token) for token in token_ids)
        with self._wanting:
            found = [name for name, wanted in self._wanted.items() if ids[: len(wanted)] == wanted]
            if not found:
                return False
            name = max(found, key=lambda name: len(self._wanted[name]))
            del self._wanted[name]
            self._orders[request_id] = ExportOrder(name, ids, BlockTable(tuple(block_ids), size))
            return True

    def take_order(self, request_id: int) -> ExportOrder | None:
        with self._wanting:
            return self._orders.pop(request_id, None)


def _exports() -> WantedExports:
    path, config = read_config()
    exports = import_object(config.exports) if config.exports else None
    if not isinstance(exports, WantedExports):
        raise InputError(
            f"{path} names no WantedExports under exports, so this engine is no source; let it "
            f"name one, as module:name."
        )
    return exports


class KvExportScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """Holds the blocks of a finished request that is wanted until its KV is copied out."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._exports = _exports()
        self._tokens_per_block = llm_args.kv_cache_config.tokens_per_block

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """A source waits for the request's end."""

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """The order is left where the worker's half finds it: the engine asks for metadata only
        before a forward pass, and after the last request there is none.
        """

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        if request.context_remaining_length > 0 or request.lora_task_id is not None:
            return False  # cancelled before its prompt was read, or not this model's own KV
        tokens = request.get_tokens(0)
        # The last token was sampled and never read, so it has no KV.
        return self._exports.order(
            request.request_id, tokens[:-1], cache_block_ids, self._tokens_per_block
        )


class KvExportWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """Copies wanted KV on a stream of its own and lets go of the blocks when the copy is done."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._exports = _exports()
        self._spec = read_spec(llm_args.model)
        require_engine(llm_args, self._spec, None)
        self._tokens_per_block = llm_args.kv_cache_config.tokens_per_block
        self._pool: KvPool | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copying: dict[int, tuple[str, Exported, torch.cuda.Event | None]] = {}

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self._pool = view_pool(kv_cache_tensor, self._spec, self._tokens_per_block)
        if kv_cache_tensor.is_cuda:
            self._stream = torch.cuda.Stream(kv_cache_tensor.device)  # type: ignore[no-untyped-call]

    def register_kv_cache_layout(self, layout: Any) -> None:
        raise MismatchError(
            "TensorRT-LLM's KV cache manager of version 2 describes several pools; set "
            "kv_cache_config.use_kv_cache_manager_v2 to False."
        )

    def start_load_kv(self, stream: Any) -> None:
        """A source loads nothing."""

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """A source loads nothing."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Exports wait for the request's end."""

    def wait_for_save(self, stream: Any) -> None:
        """Exports wait for the request's end."""

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Begin the copies of the requests that ended; name those whose copies are done."""
        lost = [request_id for request_id in finished_gen_req_ids if not self._begin(request_id)]
        done = []
        for request_id, (name, exported, copied) in self._copying.items():
            if copied is None or copied.query():  # type: ignore[no-untyped-call]
                self._exports.put(name, exported)
                done.append(request_id)
        for request_id in done:
            del self._copying[request_id]
        return lost + done, []

    def _begin(self, request_id: int) -> bool:
        """Whether a copy runs now; if not, nothing reads the blocks.

        It need not wait for the forward passes that filled them: the token sampled behind them has
        reached the host.
        """
        order = self._exports.take_order(request_id)
        if order is None or self._pool is None:
            return False
        copied = None
        try:
            if self._stream is None:
                exported = read_out(self._pool, order)
            else:
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                with torch.cuda.stream(self._stream):
                    exported = read_out(self._pool, order)
                copied.record(self._stream)
        except KvMapError as error:
            log.warning("request %s is not exported: %s", request_id, error)
            return False
        self._copying[request_id] = (order.name, exported, copied)
        return True
