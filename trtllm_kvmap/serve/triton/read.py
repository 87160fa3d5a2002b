"""A SourceRead as the tensors that go from the model `source` to the model `target`."""

from __future__ import annotations

import json
from typing import Any

import torch

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.record import spec_from_json, spec_to_json
from trtllm_kvmap.models import RemoteModel
from trtllm_kvmap.serve.source import SourceRead
from trtllm_kvmap.serve.triton.tensors import kv_of, kv_tensor, text_of, text_tensor

KV, WRITTEN_BY, HELD = "source_kv", "written_by", "held"


def read_to_tensors(read: SourceRead) -> list[Any]:
    written_by = {
        "name": read.model.name,
        "spec": spec_to_json(read.model.spec),
        "fingerprint": read.model.fingerprint.to_json(),
        "rope_length": read.rope_length,
        "tokens_read": read.tokens_read,
        "token_digest": read.token_digest,
        "losses": None if read.losses is None else read.losses.tolist(),
    }
    return [kv_tensor(KV, read.kv), text_tensor(WRITTEN_BY, json.dumps(written_by))]


def read_from_tensors(request: Any) -> SourceRead | None:
    """What a request to the target carries, or None. The KV shares the request's memory."""
    kv = kv_of(request, KV)
    if kv is None:
        return None
    written_by = json.loads(text_of(request, WRITTEN_BY))
    model = RemoteModel(
        written_by["name"],
        spec_from_json(written_by["spec"]),
        Fingerprint.from_json(written_by["fingerprint"]),
    )
    losses = written_by["losses"]
    return SourceRead(
        kv,
        written_by["rope_length"],
        model,
        written_by["tokens_read"],
        written_by["token_digest"],
        None if losses is None else torch.tensor(losses, dtype=torch.float64),
    )
