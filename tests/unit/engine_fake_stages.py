"""FAKE stages of a pipeline: no engine under them, answers that say where they come from.

The fake target answers a prompt of n tokens with n, n + 1, ... counting the tokens of its answer,
modulo its vocabulary, whatever it finds in its cache; what it was asked is in ``asked``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.manifest import Manifest
from trtllm_kvmap.engine.stages import ContextState, Deadline, Mapped, Piece
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams

SIZE, REPAIR = 4, 3
MAX_TOKENS, DRAFTS, KNOWN = 64, 5, 100


def spec(name: str, vocab_size: int = KNOWN) -> ModelSpec:
    return ModelSpec(name, "qwen3", 2, 4, 2, 8, vocab_size, 128, RopeParams(rotary_dim=8))


def manifest(**changes: Any) -> Manifest:
    config = PipelineConfig(
        tokens_per_block=SIZE,
        max_tokens=MAX_TOKENS,
        max_draft_len=DRAFTS,
        repair_window=REPAIR,
        first_tokens=2,
        max_batch_size=4,
    )
    print_of = Fingerprint("config", "weights", "tokenizer")
    entries: dict[str, Any] = {
        "config": config,
        "source": spec("small"),
        "target": spec("large"),
        "source_fingerprint": print_of,
        "target_fingerprint": print_of,
        "kvmap_digest": "digest",
        "tensorrt_llm": "1.2.1",
        "tensorrt": "10.14",
        "device": "a FAKE",
        "files": {},
    }
    return Manifest(**{**entries, **changes})


@dataclass
class FakeStages:
    """Source, relay and target in one. ``at`` is called with a stage's name and the request's
    deadline when that stage begins, and may raise or wait. ``landed`` holds what the target has
    taken, by salt; the fake forgets nothing. ``break_after`` tokens of an answer on mapped KV the
    target fails; ``hold_after`` tokens of any answer it gives no more.
    """

    at: Callable[[str, Deadline], None] = lambda stage, deadline: None
    break_after: int | None = None
    hold_after: int | None = None
    finds: Callable[[int], int | None] = lambda landed: landed
    sink: int = 1
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    landed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reading: dict[int, tuple[int, ...]] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    # --- stages.SourceStage ---

    def read(self, token_ids: Sequence[int], salt: int, deadline: Deadline) -> ContextState:
        self._ask("read", deadline, tuple(token_ids), salt)
        with self.lock:
            number = len(self.reading) + 1
            self.reading[number] = tuple(token_ids)
        return ContextState(number, f"source {number}".encode())

    def forget(self, state: ContextState) -> None:
        self.forgotten.append(state.request_id)

    # --- stages.RelayStage ---

    def map(self, state: ContextState, token_ids: Sequence[int], deadline: Deadline) -> Mapped:
        self._ask("map", deadline, state, tuple(token_ids))
        assert state.opaque == f"source {state.request_id}".encode()
        assert self.reading[state.request_id] == tuple(token_ids)
        number = 1000 + state.request_id
        return Mapped(ContextState(number, f"relay {number}".encode()), self.sink, number)

    def release(self, mapped: Mapped) -> None:
        with self.lock:
            self.released.append(mapped.held)

    # --- stages.TargetStage ---

    def land(
        self,
        token_ids: Sequence[int],
        next_token: int,
        state: ContextState,
        salt: int,
        deadline: Deadline,
    ) -> None:
        self._ask("land", deadline, tuple(token_ids), next_token, salt)
        assert state.opaque == f"relay {state.request_id}".encode()
        with self.lock:
            self.landed[salt] = tuple(token_ids)

    def answer(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        end_id: int | None,
        draft_token_ids: Sequence[int],
        salt: int | None,
        deadline: Deadline,
    ) -> Iterator[Piece]:
        self._ask("answer", deadline, tuple(token_ids), max_tokens, tuple(draft_token_ids), salt)
        landed = len(self.landed[salt]) if salt is not None else 0
        for index in range(max_tokens):
            deadline.check("The target's answer")
            if salt is not None and index == self.break_after:
                raise RuntimeError("the engine fell over")
            while index == self.hold_after:
                deadline.wait("The target's answer")
            token = (len(token_ids) + index) % KNOWN
            last = index + 1 == max_tokens or token == end_id
            reason = None if not last else "stop" if token == end_id else "length"
            yield Piece((token,), reason, self.finds(landed) if last else None)
            if last:
                return

    def _ask(self, stage: str, deadline: Deadline, *what: Any) -> None:
        with self.lock:
            self.asked.append((stage, *what))
        self.at(stage, deadline)

    def stages(self) -> list[str]:
        return [entry[0] for entry in self.asked]

    def asked_for(self, stage: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.asked if entry[0] == stage]


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.001)
