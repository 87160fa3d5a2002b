"""What identifies a model for a map: digests of its configuration, weights and tokenizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trtllm_kvmap.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """sha256 hex digests. Models with equal fingerprints produce the same KV for the same text."""

    config: str
    weights: str
    tokenizer: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @staticmethod
    def from_json(entry: dict[str, str]) -> Fingerprint:
        return Fingerprint(**entry)

    def require(self, other: Fingerprint, role: str, made: str = "The map was fitted") -> None:
        """Raise MismatchError naming the parts in which ``other``, the model at hand, differs from
        this one. ``role``: source or target; ``made`` begins the sentence.
        """
        differing = [
            part
            for part in ("config", "weights", "tokenizer")
            if getattr(self, part) != getattr(other, part)
        ]
        if differing:
            several = len(differing) > 1 or differing == ["weights"]
            raise MismatchError(
                f"{made} for another {role} model: {' and '.join(differing)} "
                f"{'differ' if several else 'differs'}. Give the "
                f"{role} that it was made for, or make one for this model."
            )
