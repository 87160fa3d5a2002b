"""One sequence of a batch that is drafted and verified: what it has said, and how far it may go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trtllm_kvmap.models import LoadedModel


@dataclass(slots=True)
class DraftedRow:
    """``start`` tokens of prompt, then ``tokens``; the next block's length, and what was counted:
    tokens ``proposed`` and ``accepted``, verify ``steps``.
    """

    start: int
    block_length: int
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    proposed: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def length(self) -> int:
        return self.start + len(self.tokens)

    def commit(
        self, tokens: Sequence[int], max_new_tokens: int, eos_token_ids: Collection[int]
    ) -> int:
        """Append ``tokens`` up to the first end token, and return how many."""
        ends = [index for index, token in enumerate(tokens) if token in eos_token_ids]
        taken = tokens[: ends[0] + 1] if ends else tokens
        self.tokens += taken
        self.done = bool(ends) or len(self.tokens) == max_new_tokens
        return len(taken)

    def most_proposals(self, verifier: LoadedModel, max_new_tokens: int) -> int:
        """How many tokens may be proposed next: the verifier adds one more, and the whole block
        must be rotated as plain decoding would rotate its first token.
        """
        if self.done:
            return 0
        wanted = min(self.block_length, max_new_tokens - len(self.tokens) - 1)
        rope = verifier.spec.rope
        if not rope.length_dependent:
            return wanted
        here = rope.regime(verifier.rope_length(self.length))
        ahead = range(self.length + 1, self.length + wanted + 1)
        changes = (n for n in ahead if rope.regime(verifier.rope_length(n)) != here)
        return next(changes, ahead.stop) - self.length - 1
