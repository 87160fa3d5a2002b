"""A model in this process, or what is known of one in another."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.errors import MismatchError
from trtllm_kvmap.models.digest import fingerprint_of
from trtllm_kvmap.models.tokenizer import tokenise
from trtllm_kvmap.spec.model import ModelSpec


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer (None for a folder without one) and its spec. ``fingerprint`` is
    computed on first use.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    spec: ModelSpec

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self.model, self.tokenizer, self.spec)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises InputError when there is no tokenizer or it cannot write ``text``."""
        return tokenise(self.tokenizer, self.name, text, add_special_tokens=add_special_tokens)

    def rope_length(self, sequence_length: int) -> int:
        """The length whose frequencies the keys of a pass ending at ``sequence_length`` tokens were
        written with.

        transformers' dynamic RoPE remembers the longest sequence it has seen; every other kind
        depends on this sequence alone.
        """
        if self.spec.rope.kind != "dynamic" or sequence_length < self.spec.rope.original_length:
            return sequence_length  # a sequence shorter than the original length resets the memory
        rotary: Any = self.model.base_model.rotary_emb
        return max(sequence_length, int(rotary.max_seq_len_cached))

    @cached_property
    def cache_argument(self) -> str:
        """What the model's forward calls its cache: past_key_values, or cache in newer
        transformers.
        """
        accepted = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in accepted else "past_key_values"


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that another process holds: enough to check a cache it sent, not to run it."""

    name: str
    spec: ModelSpec
    fingerprint: Fingerprint


KnownModel = LoadedModel | RemoteModel


def require_same_tokens(source: KnownModel, target: KnownModel) -> None:
    """Raise MismatchError unless both models read the same token ids."""
    if source.fingerprint.tokenizer != target.fingerprint.tokenizer:
        raise different_tokenizers(source.name, target.name)


def different_tokenizers(source: str, target: str) -> MismatchError:
    return MismatchError(
        f"{source} and {target} have different tokenizers, so their caches do not stand for the "
        f"same tokens. A map needs one tokenizer for both; choose a pair of one family."
    )
