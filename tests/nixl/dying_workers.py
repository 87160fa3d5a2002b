"""The two workers of serve.processes, which kill themselves at a stage of the protocol.

The stage stands in a file, which is emptied before the kill, so that a successor lives.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trtllm_kvmap.exchange import send
from trtllm_kvmap.exchange.channel import Channel
from trtllm_kvmap.exchange.messages import Accept, Blocks, End, Message, Offer
from trtllm_kvmap.exchange.nixl import NixlReader
from trtllm_kvmap.serve.processes import source, target
from trtllm_kvmap.serve.processes.front import WorkerPair
from trtllm_kvmap.serve.processes.work import PairSettings

SOURCE_STAGES = (
    "before the prompt is read",
    "before Offer is sent",
    "after Offer is sent",
    "when Accept comes",
    "before Blocks is sent",
    "after Blocks is sent",
)
TARGET_STAGES = (
    "when the question comes",
    "when Offer comes",
    "before Accept is sent",
    "after Accept is sent",
    "when Blocks comes",
    "after the first read",
    "before End is sent",
    "after End is sent",
    "before the answer",
)


def die_at(stages: Path, stage: str) -> None:
    if stages.read_text() == stage:
        stages.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)


def watch_channel(stages: Path) -> None:
    """Die before or after a message of a kind is sent, or when one comes."""
    sending, receiving = Channel.send, Channel.receive

    def send_message(self: Channel, message: Message) -> None:
        name = type(message).__name__
        die_at(stages, f"before {name} is sent")
        sending(self, message)
        die_at(stages, f"after {name} is sent")

    def receive_message(self: Channel, timeout: float) -> Message | None:
        message = receiving(self, timeout)
        if isinstance(message, Offer | Accept | Blocks | End):
            die_at(stages, f"when {type(message).__name__} comes")
        return message

    Channel.send, Channel.receive = send_message, receive_message  # type: ignore[method-assign]


def dies_before(stages: Path, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        die_at(stages, stage)
        return function(*arguments, **options)

    return call


def run_source(stages: Path, front: Connection, settings: PairSettings) -> None:
    watch_channel(stages)
    send.BATCH_BYTES = 1  # a message for every block, so that there are blocks after the first
    source.read_to_offer = dies_before(stages, "before the prompt is read", source.read_to_offer)
    source.run_source(front, settings)


def run_target(stages: Path, front: Connection, settings: PairSettings) -> None:
    watch_channel(stages)
    finished = NixlReader.finished

    def finish(self: NixlReader, transfer: Any) -> bool:
        done = finished(self, transfer)
        if done:
            die_at(stages, "after the first read")
        return done

    NixlReader.finished = finish  # type: ignore[method-assign]
    target.receive_blocks = dies_before(stages, "when the question comes", target.receive_blocks)
    target.generate = dies_before(stages, "before the answer", target.generate)
    target.run_target(front, settings)


class DyingPair(WorkerPair):
    """A WorkerPair whose workers die at the stage that ``stages`` holds."""

    def __init__(self, settings: PairSettings, stages: Path) -> None:
        self.stages = stages
        stages.write_text("")
        self.source_main = partial(run_source, stages)  # type: ignore[assignment]
        self.target_main = partial(run_target, stages)  # type: ignore[assignment]
        super().__init__(settings)
