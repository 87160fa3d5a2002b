"""A FAKE of TensorRT-LLM's PyExecutor: its order of calls to a connector, step by step, around a
real model on a paged pool.

The order was read in tensorrt_llm/_torch/pyexecutor/{py_executor,resource_manager}.py and the
connector's own file. What is left out: overlap of steps, CUDA, ranks, asynchronous loads (refused
here), and everything a connector cannot see.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fake_kv_cache import FakeKvCache
from paged_target import PagedTarget, Work

from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.layout import BlockTable


@dataclass(frozen=True)
class Names:
    """The fake package's classes that an executor makes."""

    request_data: Any
    scheduler_output: Any


class FakeExecutor:
    """One step at a time; ``trace`` holds the names of the connector's calls in order.

    ``salt_of`` says which salt the reuse tree keys a request's blocks with. ``max_num_tokens`` are
    computed in a step at most; prompts longer than that are read in chunks of whole blocks.
    """

    def __init__(
        self,
        target: LoadedModel,
        cache: FakeKvCache,
        scheduler: Any,
        worker: Any,
        names: Names,
        salt_of: Callable[[Any], object],
        *,
        max_num_tokens: int = 8192,
        max_batch_size: int = 8,
    ) -> None:
        self.cache, self.scheduler, self.worker = cache, scheduler, worker
        self.trace: list[str] = []
        self._model = PagedTarget(target, cache.blocks)
        self._names, self._salt_of = names, salt_of
        self._max_num_tokens, self._max_batch_size = max_num_tokens, max_batch_size
        self._waiting: deque[Any] = deque()
        self._running: list[Any] = []
        self._matched: dict[int, int] = {}  # reported once, as connector-matched
        self._reported: dict[int, tuple[int, int]] = {}  # tokens, blocks
        self._new_saving: dict[int, Any] = {}
        self._saving: dict[int, Any] = {}
        worker.register_kv_caches(cache.pool)

    def submit(self, request: Any) -> None:
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._new_saving or self._saving)

    def step(self) -> None:
        scheduled = self._schedule()
        if scheduled:
            self._prepare(scheduled)
            output = self._scheduler_output(scheduled)
            self.trace.append("build_connector_meta")
            # Broadcast to every rank.
            meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
            self.trace.append("bind_connector_meta")
            self.worker.bind_connector_meta(meta)
            self.trace.append("start_load_kv")
            self.worker.start_load_kv(None)
            self._forward_and_sample(scheduled)
        self._finish_transfers()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        for _ in range(10_000):
            if until() if until is not None else not self.busy:
                return
            self.step()
        raise AssertionError("the executor makes no progress")

    # --- Scheduling: nothing is evicted once begun ---

    def _schedule(self) -> list[tuple[Any, int]]:
        """(request, tokens to compute); 0 for one whose first chunk is yet to be measured."""
        budget, scheduled = self._max_num_tokens, []
        for request in self._running:
            if request.context_remaining_length > 0:
                chunk = self._chunk(request, budget)
                if chunk:
                    scheduled.append((request, chunk))
                    budget -= chunk
            else:
                scheduled.append((request, 1))
                budget -= 1
        while self._waiting and len(self._running) < self._max_batch_size and budget > 0:
            request = self._waiting[0]
            # Blocks that are cached count as taken: the next one may use them.
            if self._blocks_to_the_end(request) > self.cache.num_available - self._reserved():
                break
            self._running.append(self._waiting.popleft())
            scheduled.append((request, 0))
            budget -= self.cache.tokens_per_block  # at least; the rest of it is shared out later
        return scheduled

    def _chunk(self, request: Any, budget: int) -> int:
        remaining, size = request.context_remaining_length, self.cache.tokens_per_block
        if remaining <= budget:
            return remaining
        position = request.context_current_position
        return max((position + budget) // size * size - position, 0)

    def _blocks_to_the_end(self, request: Any) -> int:
        return self.cache.blocks_for(request.prompt_len + request.max_new_tokens)

    def _reserved(self) -> int:
        """Blocks that the running requests will still ask for."""
        held = {
            request.request_id: len(self.cache.get_cache_indices(request))
            for request in self._running
            if request.request_id in self._reported
        }
        return sum(
            self._blocks_to_the_end(request) - held.get(request.request_id, 0)
            for request in self._running
        )

    # --- Resources ---

    def _prepare(self, scheduled: list[tuple[Any, int]]) -> None:
        spent = sum(tokens for _, tokens in scheduled)
        for index, (request, tokens) in enumerate(scheduled):
            if request.request_id not in self._reported:
                self._begin(request)
                budget = max(self._max_num_tokens - spent, self.cache.tokens_per_block)
                tokens = self._chunk(request, budget)
                spent += tokens
                scheduled[index] = request, tokens
                self._reported[request.request_id] = 0, 0
            self.cache.grow(request, self._end(request, tokens))

    def _begin(self, request: Any) -> None:
        first = request.prompt_len
        if self.cache.blocks_by_chunk:
            first = min(first, self._max_num_tokens)
        computed = self.cache.add_sequence(request, self._salt_of(request), first)
        self.trace.append("get_num_new_matched_tokens")
        matched, load_async = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert not load_async, "asynchronous loads are not part of this fake"
        assert matched >= 0
        assert computed + matched < request.prompt_len, "at least one token must be uncomputed"
        request.cached = computed
        request.context_current_position = computed + matched
        self._matched[request.request_id] = matched
        self.trace.append("update_state_after_alloc")
        self.scheduler.update_state_after_alloc(request, self.cache.get_cache_indices(request))

    def _end(self, request: Any, tokens: int) -> int:
        """Tokens that have KV after this step."""
        if request.context_remaining_length > 0:
            return request.context_current_position + tokens
        return len(request.tokens)

    def _scheduler_output(self, scheduled: list[tuple[Any, int]]) -> Any:
        output = self._names.scheduler_output()
        for request, tokens in scheduled:
            seen, had = self._reported[request.request_id]
            blocks = self.cache.get_cache_indices(request)
            in_context = request.context_remaining_length > 0
            position = request.context_current_position if in_context else len(request.tokens) - 1
            data = self._names.request_data(
                request_id=request.request_id,
                new_tokens=request.tokens[seen:],
                new_block_ids=blocks[had:],
                computed_position=position - self._matched.pop(request.request_id, 0),
                num_scheduled_tokens=tokens,
            )
            (output.cached_requests if seen else output.new_requests).append(data)
            self._reported[request.request_id] = len(request.tokens), len(blocks)
        return output

    # --- The forward pass, and what follows it ---

    def _forward_and_sample(self, scheduled: list[tuple[Any, int]]) -> None:
        try:
            logits = self._forward(scheduled)
        except Exception as error:  # the engine fails every request it has begun
            for request in list(self._running):
                request.error = str(error)
                self._terminate(request)
            return
        for (request, tokens), row in zip(scheduled, logits, strict=True):
            in_context = request.context_remaining_length > 0
            if in_context:
                request.context_current_position += tokens
            if request.context_remaining_length == 0:
                request.tokens.append(int(row.argmax()))
                if in_context:
                    self.cache.store_blocks(request, request.prompt_len)
        for request in list(self._running):
            if request.cancelled or self._generated(request) >= request.max_new_tokens:
                self._terminate(request)

    def _forward(self, scheduled: list[tuple[Any, int]]) -> list[Any]:
        works = []
        for request, tokens in scheduled:
            end = self._end(request, tokens)
            table = BlockTable(
                tuple(self.cache.get_cache_indices(request)), self.cache.tokens_per_block
            )
            works.append(Work(request.tokens[end - tokens : end], end - tokens, table))
        logits = self._model.forward(works, self._before_layer, self._after_layer)
        self.trace.append("wait_for_save")
        self.worker.wait_for_save(None)
        return logits

    def _before_layer(self, layer: int) -> None:
        self.trace.append(f"wait_for_layer_load {layer}")
        self.worker.wait_for_layer_load(layer, None)

    def _after_layer(self, layer: int) -> None:
        self.trace.append(f"save_kv_layer {layer}")
        self.worker.save_kv_layer(layer, None)

    def _generated(self, request: Any) -> int:
        return len(request.tokens) - request.prompt_len

    def _terminate(self, request: Any) -> None:
        self._running.remove(request)
        if request.context_remaining_length == 0:
            self.cache.store_blocks(request, len(request.tokens) - 1)
        self.trace.append("request_finished")
        held = self.scheduler.request_finished(request, self.cache.get_cache_indices(request))
        if held:
            self._new_saving[request.request_id] = request
        else:
            self.cache.remove_sequence(request)

    def _finish_transfers(self) -> None:
        started = list(self._new_saving)
        self._saving.update(self._new_saving)
        self._new_saving.clear()
        self.trace.append("get_finished")
        saved, loaded = self.worker.get_finished(started, [])
        assert not loaded, "nothing was loaded asynchronously"
        for request_id in saved:
            self.cache.remove_sequence(self._saving.pop(request_id))
