"""The model `target` of the repository: token ids, a job and perhaps the source's keys and values
in; the events of an answer out, one response each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_kvmap.models import load_model
from trtllm_kvmap.serve.target import Job, TargetAnswerer
from trtllm_kvmap.serve.traffic import CountedAnswerer
from trtllm_kvmap.serve.triton.read import read_from_tensors
from trtllm_kvmap.serve.triton.tensors import ids_of, parameter, send_all, text_of, text_tensor


class TritonPythonModel:
    """What the python backend calls."""

    def initialize(self, arguments: dict[str, str]) -> None:
        self.answerer = TargetAnswerer(
            load_model(parameter(arguments, "model")),
            parameter(arguments, "kvmap"),
            allow_unproven=parameter(arguments, "allow_unproven") == "true",
        )
        if self.answerer.kvmap is None:
            pb_utils.Logger.log_warn(f"Nothing will be mapped: {self.answerer.without.kv_reason}")
        self.counted: CountedAnswerer | None = None
        if folder := parameter(arguments, "traffic"):
            share = float(parameter(arguments, "traffic_share"))
            self.counted = CountedAnswerer(self.answerer, folder, share)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            send_all(request, partial(self._responses, request))

    def finalize(self) -> None:
        if self.counted is not None:
            self.counted.close()

    def _responses(self, request: Any) -> Iterator[Any]:
        job = Job.from_json(json.loads(text_of(request, "job")))
        token_ids = ids_of(request, "token_ids")
        answerer = self.counted or self.answerer
        for event in answerer.answer(token_ids, job, read_from_tensors(request)):
            yield pb_utils.InferenceResponse([text_tensor("event", json.dumps(event.to_json()))])
