"""What tells two loaded models apart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.models.tokenizer import tokenizer_digest
from trtllm_kvmap.spec.model import ModelSpec


def fingerprint_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, spec: ModelSpec
) -> Fingerprint:
    """Digests of a loaded model: one changed weight, token or RoPE parameter changes one."""
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return Fingerprint(
        config=config_digest(spec),
        weights=weights.hexdigest(),
        tokenizer=tokenizer_digest(tokenizer, spec.vocab_size),
    )


def config_digest(spec: ModelSpec) -> str:
    config = json.dumps(asdict(replace(spec, name="")), sort_keys=True)
    return hashlib.sha256(config.encode()).hexdigest()
