"""The model `kvmap_whole` of the repository: kvmap_pipeline with one response to a request, so that
`infer` serves it, which alone forwards HTTP headers.
"""

from __future__ import annotations

from typing import Any

from trtllm_kvmap.serve.triton import pipeline
from trtllm_kvmap.serve.triton.tensors import error_response


class TritonPythonModel(pipeline.TritonPythonModel):
    """What the python backend calls."""

    streams = False

    def execute(self, requests: list[Any]) -> list[Any]:  # type: ignore[override]
        return [self._whole(request) for request in requests]

    def _whole(self, request: Any) -> Any:
        try:
            (response,) = self._responses(request)
            return response
        except Exception as error:
            self.counters.count_error()
            return error_response(error)
