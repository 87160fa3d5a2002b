"""What a map must know of a model: the shape of its cache and how its keys are rotated."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.spec.rope import RopeParams


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The KV geometry of one decoder-only model with full attention in every layer.

    ``num_heads`` counts query heads, ``num_kv_heads`` KV heads; ``max_positions`` is the longest
    sequence the model's configuration allows, in tokens; ``dtype`` the type its weights are stored
    in.
    """

    name: str
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope: RopeParams
    dtype: str = "float32"

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(num_layers, num_kv_heads, head_dim)."""
        return self.num_layers, self.num_kv_heads, self.head_dim

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element
