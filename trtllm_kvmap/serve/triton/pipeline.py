"""The model `kvmap_pipeline` of the repository: an OpenAI request in, response objects out, the two
models asked through Triton (business logic scripting). Tensors stay in the server's shared memory.
"""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_kvmap.errors import KvMapError, UnavailableError
from trtllm_kvmap.models import load_tokenizer, read_spec
from trtllm_kvmap.serve.map_header import MapHeader
from trtllm_kvmap.serve.metrics import Counters, Family
from trtllm_kvmap.serve.pipeline import Pipeline, PipelineConfig
from trtllm_kvmap.serve.policy import Policy, Routed, source_reads
from trtllm_kvmap.serve.settings import SPEEDS
from trtllm_kvmap.serve.source import Owner
from trtllm_kvmap.serve.target import Event, Job
from trtllm_kvmap.serve.triton.read import HELD, KV, WRITTEN_BY
from trtllm_kvmap.serve.triton.tensors import (
    ids_tensor,
    parameter,
    parameters_of,
    send_all,
    text_of,
    text_tensor,
)


class TritonPythonModel:
    """What the python backend calls."""

    streams = True

    def initialize(self, arguments: dict[str, str]) -> None:
        target = parameter(arguments, "target")
        header = header_of(parameter(arguments, "kvmap"))
        config = PipelineConfig(
            name=arguments["model_name"],
            max_positions=read_spec(target).max_positions,
            mapper_id=parameter(arguments, "mapper_id"),
            first_tokens=int(parameter(arguments, "first_tokens")),
            repair_window=int(parameter(arguments, "repair_window")),
            guarded=header is not None and header.guarded,
            streams=self.streams,
        )
        policy: Policy = source_reads
        speeds = Path(arguments["model_repository"]) / SPEEDS
        if header is not None and speeds.is_file():
            policy = Routed.load(speeds, header, config.repair_window, held=ask_held)
        self.pipeline = Pipeline(
            config, load_tokenizer(target), read=ask_source, answer=self._ask_target, policy=policy
        )
        self.answer: Any = None
        self.counters = Counters(counter_family)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            respond = partial(self._responses, request)
            send_all(request, respond, on_error=self.counters.count_error)

    def finalize(self) -> None:
        # Triton 2.51 ends a stub before its metrics, which then crash in it (server#8662): no news.
        faulthandler.disable()

    def _responses(self, request: Any) -> Iterator[Any]:
        body, parameters = text_of(request, "request"), parameters_of(request)
        try:
            for answered in self.pipeline.respond(body, parameters):
                if answered.last is not None:
                    self.counters.count(answered.last)
                tensor = text_tensor("response", json.dumps(answered.body))
                yield pb_utils.InferenceResponse([tensor])
        finally:
            self._let_go(request)

    def _ask_target(
        self, token_ids: list[int], job: Job, read: list[Any] | None
    ) -> Iterator[Event]:
        self.answer = ask_target(token_ids, job, read)
        for response in self.answer:
            if response.has_error():
                raise UnavailableError(response.error().message())
            if response.output_tensors():
                event = pb_utils.get_output_tensor_by_name(response, "event").as_numpy()[0]
                yield Event.from_json(json.loads(event))

    def _let_go(self, request: Any) -> None:
        """Drop the target's responses when Triton's own thread has dropped them.

        Up to 24.11, that thread does not take the GIL: the last to hold a response, it frees numpy
        arrays beside running Python, which corrupts the heap. It works off a queue, where the
        question below stands behind the end of the answer.
        """
        request.is_cancelled()
        self.answer = None


def header_of(kvmap: str) -> MapHeader | None:
    """None for a map that cannot be read: the target says so in every answer."""
    try:
        return MapHeader.read(kvmap)
    except KvMapError as error:
        pb_utils.Logger.log_warn(f"Nothing will be mapped: {error}")
        return None


def ask_source(token_ids: list[int], owner: Owner, judged: int) -> list[Any]:
    """The tensors of the source's read, still in shared memory."""
    return _ask_source(token_ids, owner, judged, [KV, WRITTEN_BY])


def ask_held(token_ids: list[int], owner: Owner) -> int:
    (held,) = _ask_source(token_ids, owner, 0, [HELD])
    return int(held.as_numpy()[0])


def _ask_source(token_ids: list[int], owner: Owner, judged: int, outputs: list[str]) -> list[Any]:
    asked = pb_utils.InferenceRequest(
        model_name="source",
        inputs=[
            ids_tensor("token_ids", token_ids),
            text_tensor("owner", json.dumps(owner)),
            ids_tensor("judged", [judged]),
        ],
        requested_output_names=outputs,
    )
    response = asked.exec()
    if response.has_error():
        raise UnavailableError(response.error().message())
    return [pb_utils.get_output_tensor_by_name(response, name) for name in outputs]


def ask_target(token_ids: list[int], job: Job, read: list[Any] | None) -> Any:
    """The target's responses, an iterator that Triton fills."""
    asked = pb_utils.InferenceRequest(
        model_name="target",
        inputs=[
            ids_tensor("token_ids", token_ids),
            text_tensor("job", json.dumps(job.to_json())),
            *(read or []),
        ],
        requested_output_names=["event"],
    )
    return asked.exec(decoupled=True)


def counter_family(name: str, description: str) -> Family:
    kind = pb_utils.MetricFamily.COUNTER
    family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
    return lambda labels: family.Metric(labels=labels)
