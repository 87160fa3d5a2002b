"""What Triton's python backend gives a model, as plain Python values, and back."""

from __future__ import annotations

import faulthandler
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from trtllm_kvmap.errors import InputError, KvMapError
from trtllm_kvmap.serve.pipeline import error_sentence

# Triton's log does not say that a stub crashed, and PYTHONFAULTHANDLER is not read in one.
faulthandler.enable()


def parameter(arguments: dict[str, str], name: str) -> str:
    """A parameter of the model's config.pbtxt; ``arguments`` is what initialize() is given."""
    parameters = json.loads(arguments["model_config"])["parameters"]
    return str(parameters[name]["string_value"])


def text_of(request: Any, name: str) -> str:
    """A string tensor of one element. Raises InputError when it is not UTF-8."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    (value,) = tensor.as_numpy().reshape(-1).tolist()
    try:
        return value if isinstance(value, str) else bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"`{name}` is not UTF-8: {error}.") from error


def parameters_of(request: Any) -> dict[str, Any]:
    """What came beside the tensors: of the client's parameters and its forwarded headers. Raises
    InputError when they are not UTF-8.
    """
    try:
        given: dict[str, Any] = json.loads(request.parameters())
    except UnicodeDecodeError as error:
        raise InputError(f"A parameter or header is not UTF-8: {error}.") from error
    return given


def text_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def ids_of(request: Any, name: str) -> list[int]:
    ids: list[int] = pb_utils.get_input_tensor_by_name(request, name).as_numpy().tolist()
    return ids


def ids_tensor(name: str, token_ids: list[int]) -> Any:
    return pb_utils.Tensor(name, np.array(token_ids, dtype=np.int64))


def kv_of(request: Any, name: str) -> torch.Tensor | None:
    """A float32 tensor, or None when this request has none. It shares the request's memory."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else torch.from_numpy(tensor.as_numpy())


def kv_tensor(name: str, kv: torch.Tensor) -> Any:
    return pb_utils.Tensor(name, kv.numpy())


def error_response(error: Exception) -> Any:
    """A refusal of the client's request, or a failure of ours, which the server's log shows."""
    if not isinstance(error, KvMapError):
        pb_utils.Logger.log_error(traceback.format_exc())
    code = (
        pb_utils.TritonError.INVALID_ARG
        if isinstance(error, InputError)
        else pb_utils.TritonError.INTERNAL
    )
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(error_sentence(error), code))


def send_all(
    request: Any,
    responses: Callable[[], Iterator[Any]],
    on_error: Callable[[], None] = lambda: None,
) -> None:
    """Send every response of a decoupled model, then close. An error becomes the last response;
    ``on_error`` is called before it is sent, so that who has read it finds it counted.
    """
    sender = request.get_response_sender()
    try:
        for response in responses():
            sender.send(response)
    except Exception as error:
        on_error()
        sender.send(error_response(error))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
