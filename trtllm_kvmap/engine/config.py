"""What one pipeline is built for: limits that its three engines share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trtllm_kvmap.errors import InputError

# Paged context FMHA, which an engine needs to go on from cached blocks, has no float32 kernels.
ENGINE_DTYPES = ("bfloat16", "float16")
BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Lengths in tokens. ``dtype`` is that of weights and caches; ``max_tokens`` bounds prompt and
    answer together, ``max_batch_size`` the requests an engine runs at once, ``max_num_tokens`` the
    tokens of one of its steps, ``max_draft_len`` the draft tokens the target verifies in one.
    ``relay_requests`` hand-overs have room in the relay at a time. ``first_tokens`` and
    ``repair_window`` as in spec.plan.

    Raises InputError for values no engine can be built with.
    """

    dtype: str = "bfloat16"
    tokens_per_block: int = 32
    max_tokens: int = 8192
    max_batch_size: int = 8
    max_num_tokens: int = 8192
    max_draft_len: int = 24
    relay_requests: int = 4
    first_tokens: int = 1
    repair_window: int = 32

    def __post_init__(self) -> None:
        if self.dtype not in ENGINE_DTYPES:
            raise InputError(
                f"dtype is {self.dtype!r}; paged context FMHA needs one of "
                f"{', '.join(ENGINE_DTYPES)}."
            )
        for field in fields(self):
            least = 0 if field.name in ("max_draft_len", "first_tokens", "repair_window") else 1
            value = getattr(self, field.name)
            if field.name != "dtype" and (type(value) is not int or value < least):
                raise InputError(
                    f"{field.name} is {value!r}; it must be a whole number of at least {least}."
                )
        if self.tokens_per_block & (self.tokens_per_block - 1):
            raise InputError(
                f"tokens_per_block is {self.tokens_per_block}; TensorRT-LLM needs a power of two."
            )
        if self.max_tokens < self.tokens_per_block + max(self.repair_window, 1):
            raise InputError(
                f"max_tokens is {self.max_tokens}, so that no prompt has a whole block of "
                f"{self.tokens_per_block} tokens before its repair_window of "
                f"{self.repair_window}; raise max_tokens."
            )

    @property
    def max_blocks(self) -> int:
        """The blocks of the longest sequence."""
        return -(-self.max_tokens // self.tokens_per_block)

    @property
    def target_max_tokens(self) -> int:
        """TensorRT-LLM's builder lengthens a verifier's sequences by its draft tokens."""
        return self.max_tokens + self.max_draft_len

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(settings: Mapping[str, Any]) -> PipelineConfig:
        """Raises InputError for a setting that does not exist."""
        unknown = sorted(set(settings) - {field.name for field in fields(PipelineConfig)})
        if unknown:
            raise InputError(
                f"A pipeline has no setting {', '.join(unknown)}; it has "
                f"{', '.join(field.name for field in fields(PipelineConfig))}."
            )
        return PipelineConfig(**settings)
