"""The model `source` of the repository: token ids in, keys and values out."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_kvmap.models import load_model
from trtllm_kvmap.serve.source import SourceReader
from trtllm_kvmap.serve.triton.read import read_to_tensors
from trtllm_kvmap.serve.triton.tensors import error_response, ids_of, parameter, text_of


class TritonPythonModel:
    """What the python backend calls."""

    def initialize(self, arguments: dict[str, str]) -> None:
        loaded = load_model(parameter(arguments, "model"))
        self.reader = SourceReader(loaded, int(parameter(arguments, "max_held_tokens")))

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            tenant, conversation = json.loads(text_of(request, "owner"))
            read = self.reader.read(ids_of(request, "token_ids"), (tenant, conversation))
            return pb_utils.InferenceResponse(read_to_tensors(read))
        except Exception as error:
            return error_response(error)
