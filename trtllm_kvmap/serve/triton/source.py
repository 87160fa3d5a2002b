"""The model `source` of the repository: token ids in, keys and values out. Asked for `held` alone,
it says how many of the tokens it has read in an earlier turn, and reads nothing.
"""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_kvmap.models import load_model
from trtllm_kvmap.serve.source import SourceReader
from trtllm_kvmap.serve.triton.read import HELD, read_to_tensors
from trtllm_kvmap.serve.triton.tensors import error_response, ids_of, ids_tensor, parameter, text_of


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
            owner, token_ids = (tenant, conversation), ids_of(request, "token_ids")
            if set(request.requested_output_names()) == {HELD}:
                held = self.reader.held(token_ids, owner)
                return pb_utils.InferenceResponse([ids_tensor(HELD, [held])])
            (judged,) = ids_of(request, "judged")
            return pb_utils.InferenceResponse(
                read_to_tensors(self.reader.read(token_ids, owner, judged))
            )
        except Exception as error:
            return error_response(error)
