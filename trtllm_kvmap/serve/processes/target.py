"""The target's process: takes the source's blocks, or reads the prompt itself, and answers."""

from __future__ import annotations

from multiprocessing.connection import Connection

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.remote import Ready, expected_blocks, reprefill, take_over
from trtllm_kvmap.errors import KvMapError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import Listener
from trtllm_kvmap.exchange.receive import receive_blocks
from trtllm_kvmap.exchange.transport import Transport, make_transport
from trtllm_kvmap.models import RemoteModel, load_model
from trtllm_kvmap.serve.processes.source import POOL_DTYPE, pool_layout
from trtllm_kvmap.serve.processes.work import (
    Answer,
    Cancel,
    CannotStart,
    Failure,
    PairSettings,
    Question,
)


def run_target(front: Connection, settings: PairSettings) -> None:
    """Until the front closes its pipe."""
    try:
        worker = TargetWorker(front, settings)
    except KvMapError as error:
        front.send(CannotStart(str(error)))
        return
    front.send(worker.listener.address)
    while True:
        try:
            work = front.recv()
        except EOFError:
            return
        if isinstance(work, Question):
            try:
                front.send(worker.answer(work))
            except KvMapError as error:
                front.send(Failure(work.request_id, str(error)))


class TargetWorker:
    """One request at a time."""

    def __init__(self, front: Connection, settings: PairSettings) -> None:
        kvmap = KvMap.load(settings.kvmap, allow_unproven=settings.allow_unproven)
        # The source runs elsewhere; the map says which model it must be, and the offer proves it.
        source = RemoteModel(settings.source, kvmap.source, kvmap.source_fingerprint)
        self.bridge = KvBridge(kvmap, source=source, target=load_model(settings.target))
        self.landing = BlockPool.allocate(pool_layout(kvmap.source.kv_shape, settings), POOL_DTYPE)
        self.transports: dict[str, Transport] = {
            settings.transport: make_transport(settings.transport)
        }
        self.listener = Listener()
        self._front, self._settings = front, settings

    def answer(self, question: Question) -> Answer:
        ready = self._ready(question)
        reply = generate(self.bridge.target, ready.cache, ready.logits, question.max_new_tokens)
        return Answer(question.request_id, tuple(reply), ready.status, ready.unlike)

    def _ready(self, question: Question) -> Ready:
        if question.no_blocks:
            return reprefill(self.bridge.target, question.token_ids, question.no_blocks)
        result = receive_blocks(
            self.listener,
            expected_blocks(self.bridge.kvmap, question.request_id, question.token_ids),
            self.transports,
            self.landing,
            wait_seconds=self._settings.wait_seconds,
            cancelled=lambda: self._told_to_stop(question.request_id),
        )
        return take_over(
            self.bridge,
            question.token_ids,
            result,
            self.landing,
            first_tokens=self._settings.first_tokens,
            repair_window=self._settings.repair_window,
        )

    def _told_to_stop(self, request_id: str) -> bool:
        while self._front.poll():
            if self._front.recv() == Cancel(request_id):
                return True
        return False
