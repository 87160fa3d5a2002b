"""The front: asks the two workers, and starts again whichever has died.

A target that dies takes the request with it, so the front asks its successor, which reads the
prompt itself: the source's blocks stay leased to the dead one and come back when the lease runs
out. A source that dies is not waited for: the target is told, and reads the prompt itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any

from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.serve.map_header import MapHeader
from trtllm_kvmap.serve.processes.source import run_source
from trtllm_kvmap.serve.processes.target import run_target
from trtllm_kvmap.serve.processes.work import (
    Answer,
    Cancel,
    CannotStart,
    Failure,
    PairSettings,
    Question,
    ReadAndOffer,
)
from trtllm_kvmap.spec.plan import HandoffPlan, plan_handoff

Main = Callable[[Connection, PairSettings], None]
STOP_SECONDS = 5.0


class WorkerPair:
    """Two processes, started when first needed. Use it as a context: it stops them.

    Raises FormatError for a map that cannot be read.
    """

    source_main: Main = staticmethod(run_source)
    target_main: Main = staticmethod(run_target)

    def __init__(self, settings: PairSettings) -> None:
        self.settings = settings
        self._header = MapHeader.read(settings.kvmap)
        self._context = multiprocessing.get_context("forkserver")
        # Loaded once, in a process without threads or devices that the workers are forked from.
        self._context.set_forkserver_preload([__name__])
        self.source = _Worker(self._context, self.source_main, settings)
        self.target = _Worker(self._context, self.target_main, settings)

    def ask(self, token_ids: Sequence[int], max_new_tokens: int) -> Answer:
        """The target's greedy reply to a prompt. It does not depend on the source: ``status`` of
        the answer says whether the source's blocks were used, and why not.

        Raises InputError for a prompt the target cannot read, UnavailableError when the target's
        worker dies on it twice or cannot be started.
        """
        question = Question(uuid.uuid4().hex, tuple(token_ids), max_new_tokens)
        plan = plan_handoff(
            len(question.token_ids),
            first_tokens=self.settings.first_tokens,
            repair_window=self.settings.repair_window,
        )
        if not plan.mapped:
            return self._without(question, "the prompt is too short to map")
        try:
            self.source.start()  # before the target begins to wait
        except UnavailableError as error:
            return self._without(question, f"the source: {error}")
        try:
            address = self.target.start()
            self.target.send(question)
            return self._answer(question, self._work(question, plan, address))
        except _WorkerDiedError:
            return self._without(question, "the target's worker died")

    def _work(
        self, question: Question, plan: HandoffPlan, address: tuple[str, int]
    ) -> ReadAndOffer:
        if self._header.guarded:  # it weighs the source's losses of the repaired tokens too
            whole, recall = question.token_ids, self._header.recalling
            return ReadAndOffer(question.request_id, whole, address, plan, recall)
        part = question.token_ids[: plan.mapped.stop]
        return ReadAndOffer(question.request_id, part, address)

    def _answer(self, question: Question, work: ReadAndOffer) -> Answer:
        """The target's, who is told when the source has died."""
        watched = [self.target.pipe, self.source.pipe]
        with contextlib.suppress(_WorkerDiedError):  # seen below, as its end
            self.source.send(work)
        while self.target.pipe not in wait(watched):
            watched.remove(self.source.pipe)  # it says nothing but its end
            self.source.died = True
            self.target.send(Cancel(question.request_id))
        return self._understood(self.target.receive())

    def _without(self, question: Question, reason: str) -> Answer:
        question = Question(
            question.request_id, question.token_ids, question.max_new_tokens, reason
        )
        try:
            self.target.start()
            self.target.send(question)
            return self._understood(self.target.receive())
        except _WorkerDiedError:
            raise UnavailableError(
                "The target's worker died while it read the prompt itself; its log says why."
            ) from None

    @staticmethod
    def _understood(answer: Any) -> Answer:
        if isinstance(answer, Failure):
            raise InputError(answer.message)
        assert isinstance(answer, Answer)
        return answer

    def __enter__(self) -> WorkerPair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.source.stop()
        self.target.stop()


class _WorkerDiedError(Exception):
    """Its pipe is closed."""


class _Worker:
    """One child process and the pipe to it."""

    def __init__(self, context: Any, main: Main, settings: PairSettings) -> None:
        self._context, self._main, self._settings = context, main, settings
        self._process: ForkServerProcess | None = None
        self._hello: Any = None
        self.died = False  # known by its pipe, a little before the process is gone
        self.pipe: Connection

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> Any:
        """What the worker said when it was ready; starts it if there is none, or it died."""
        if self._process is not None and self._process.is_alive() and not self.died:
            return self._hello
        self.stop()
        self.died = False
        self.pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=self._main, args=(theirs, self._settings), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self._hello = self.receive()
        except _WorkerDiedError:
            self._process.join(STOP_SECONDS)
            raise UnavailableError(
                f"A worker could not start (exit status {self._process.exitcode}); its log says "
                f"why."
            ) from None
        if isinstance(self._hello, CannotStart):
            self.stop()
            raise UnavailableError(f"A worker could not start: {self._hello.message}")
        return self._hello

    def send(self, work: Any) -> None:
        try:
            self.pipe.send(work)
        except OSError:
            self.died = True
            raise _WorkerDiedError from None

    def receive(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.died = True
            raise _WorkerDiedError from None

    def stop(self) -> None:
        if self._process is None:
            return
        self.pipe.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process = None
