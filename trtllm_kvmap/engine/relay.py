"""The relay: to the source it is a generation engine, to the target a context engine.

TensorRT-LLM's engines exchange KV only with peers of the same layers, heads and head size, so
between two different models stands one that has a pool of each shape, and the map engine between
the two pools.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.host import batch, bindings, tle
from trtllm_kvmap.engine.map_runner import MapRunner
from trtllm_kvmap.engine.relay_pool import RelayPool
from trtllm_kvmap.engine.stages import ContextState, Deadline, Mapped
from trtllm_kvmap.errors import UnavailableError

# Ids of hand-overs must not be those of the engines' requests, which count up from 1.
FIRST_ID = 1 << 40


@dataclass(slots=True, eq=False)
class Transfer:
    """A sequence of one pool. While it is ``running`` a peer may write or read its blocks."""

    pool: RelayPool
    request: Any
    running: bool = False


@dataclass(slots=True, eq=False)
class HandOver:
    """What one hand-over holds of the relay."""

    number: int
    transfers: list[Transfer] = field(default_factory=list)


class EngineRelay:
    """See stages.RelayStage. Thread-safe; the map runs for one hand-over at a time.

    Blocks that a transfer may still touch are never given to anyone else: a peer that died inside
    one costs the room of one hand-over, until it is known to have ended.
    """

    def __init__(
        self,
        kvmap: KvMap,
        config: PipelineConfig,
        source: RelayPool,
        target: RelayPool,
        runner: MapRunner,
    ) -> None:
        self._kvmap, self._config = kvmap, config
        self._source, self._target, self._runner = source, target, runner
        self._room = threading.Semaphore(config.relay_requests)
        self._lock = threading.RLock()  # managers, transceivers and the runner
        self._ids = count(FIRST_ID)
        self._over: list[HandOver] = []

    def map(self, state: ContextState, token_ids: Sequence[int], deadline: Deadline) -> Mapped:
        while not self._room.acquire(blocking=False):
            self._sweep()
            deadline.wait("Waiting for room in the relay")
        handover = HandOver(next(self._ids))
        try:
            self._receive(handover, state, token_ids, deadline)
            with self._lock:
                sink = self._fill(handover, token_ids)
                offered = self._offer(handover)
        except BaseException:
            self._let_go(handover)
            raise
        return Mapped(offered, sink, handover)

    def release(self, mapped: Mapped) -> None:
        self._let_go(mapped.held)

    def close(self) -> None:
        """Give the pools back, once the engines are shut down: nobody touches them any more."""
        with self._lock:
            self._source.close()
            self._target.close()

    # --- One hand-over, step by step ---

    def _receive(
        self,
        handover: HandOver,
        state: ContextState,
        token_ids: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Bring the source's blocks in."""
        # The token sampled by the source is nobody's: the target chooses its own.
        params = tle.ContextPhaseParams([0], state.request_id, state.opaque, None)
        kind = batch.LlmRequestType.LLMREQUEST_TYPE_GENERATION_ONLY
        transfer = self._add(handover, self._source, kind, token_ids, params)
        with self._lock:
            transfer.running = True
            self._source.transceiver.request_and_receive_async(transfer.request)
        while True:
            with self._lock:
                if self._ended(transfer):
                    return
            deadline.wait("The transfer from the source to the relay")

    def _fill(self, handover: HandOver, token_ids: Sequence[int]) -> int:
        """Map into the target-shaped pool; returns how many first tokens are exact."""
        number, kind = handover.number, batch.LlmRequestType.LLMREQUEST_TYPE_CONTEXT_ONLY
        self._add(handover, self._target, kind, token_ids, None)
        entry = self._kvmap.sink_for(token_ids)
        sink = min(len(entry.token_ids) if entry else 0, self._config.first_tokens, len(token_ids))
        rest = torch.tensor(token_ids[sink:], dtype=torch.int32)
        if len(rest):
            self._runner.map(self._source, self._target, number, sink, rest)
        if entry is not None and sink:
            self._target.place(number, entry.first(sink))
        incoming = handover.transfers[0]
        incoming.pool.remove(number, incoming.request)
        handover.transfers.remove(incoming)
        return sink

    def _offer(self, handover: HandOver) -> ContextState:
        """Let the target fetch what was mapped."""
        (transfer,) = handover.transfers
        transfer.running = True
        self._target.transceiver.respond_and_send_async(transfer.request)
        params = transfer.request.context_phase_params
        if params is None or params.opaque_state is None:
            raise UnavailableError("The relay's transceiver does not say where its blocks are.")
        return ContextState(int(params.req_id), bytes(params.opaque_state))

    def _add(
        self,
        handover: HandOver,
        pool: RelayPool,
        kind: Any,
        token_ids: Sequence[int],
        params: Any,
    ) -> Transfer:
        request = batch.LlmRequest(
            request_id=handover.number,
            max_new_tokens=1,
            input_tokens=list(token_ids),
            sampling_config=bindings.SamplingConfig(beam_width=1),
            is_streaming=False,
            llm_request_type=kind,
            context_phase_params=params,
        )
        with self._lock:
            pool.add(handover.number, len(token_ids), request)
        transfer = Transfer(pool, request)
        handover.transfers.append(transfer)
        return transfer

    # --- Letting go ---

    def _let_go(self, handover: HandOver) -> None:
        with self._lock:
            self._over.append(handover)
            for transfer in handover.transfers:
                # True: it had not begun, and now never will.
                if not self._ended(transfer) and transfer.pool.transceiver.cancel_request(
                    transfer.request
                ):
                    transfer.running = False
        self._sweep()

    def _sweep(self) -> None:
        """Take back the blocks of hand-overs that are over, where no transfer touches them."""
        with self._lock:
            for handover in list(self._over):
                for transfer in list(handover.transfers):
                    if self._ended(transfer):
                        transfer.pool.remove(handover.number, transfer.request)
                        handover.transfers.remove(transfer)
                if not handover.transfers:
                    self._over.remove(handover)
                    self._room.release()

    def _ended(self, transfer: Transfer) -> bool:
        """Whether no peer touches its blocks."""
        if not transfer.running:
            return True
        transceiver, request = transfer.pool.transceiver, transfer.request
        if transfer.pool is self._source:
            transceiver.check_gen_transfer_status(0)
            transfer.running = not request.is_disagg_generation_transmission_complete
        else:
            transceiver.check_context_transfer_status(0)
            transfer.running = not request.is_disagg_context_complete_state
        return not transfer.running
