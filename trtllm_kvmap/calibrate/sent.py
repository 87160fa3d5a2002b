"""What a source in another process read of a prompt, as it came here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_kvmap.calibrate.capture import CapturedKv, without_rope
from trtllm_kvmap.models import KnownModel


@dataclass(frozen=True, slots=True)
class SentKv:
    """Rotated keys and values [num_layers, num_kv_heads, num_tokens, head_dim] of the first tokens
    of a prompt, written with the frequencies of ``rope_length``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rope_length: int

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]

    def is_of(self, model: KnownModel) -> bool:
        """Whether the shapes are those that ``model`` writes."""
        layers, heads, head_dim = model.spec.kv_shape
        wanted = torch.Size((layers, heads, *self.keys.shape[2:3], head_dim))
        return self.keys.shape == self.values.shape == wanted

    def kept(self, num_tokens: int) -> SentKv:
        """A copy of the first ``num_tokens``, whatever becomes of the memory that they came in."""
        keys, values = (kv[:, :, :num_tokens].clone() for kv in (self.keys, self.values))
        return SentKv(keys, values, self.rope_length)

    def content(self, model: KnownModel) -> CapturedKv:
        """Raises NumericsError for NaN or infinity."""
        return without_rope(model, self.keys, self.values, self.rope_length)
