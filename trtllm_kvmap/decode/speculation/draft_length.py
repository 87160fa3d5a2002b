"""How many tokens a draft proposes before the verifier looks: a pure function of what was accepted.

A short block wastes passes of the verifier when the two agree, a long one wastes passes of the
draft when they do not, and how much they agree changes within one answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.errors import InputError


@dataclass(frozen=True, slots=True)
class DraftLength:
    """The next block's length, from ``shortest`` to ``longest`` tokens.

    The state is the length itself: begin with ``shortest``, and give each block's outcome to
    ``following``. It promises: a length never leaves its bounds; a block accepted whole at full
    length doubles the next; a block whose first half was not accepted halves it; any other outcome
    leaves it. A block that was cut short (by the confidence stop, or the end of the answer) never
    lengthens the next.

    ``confidence``: a greedy draft stops before a token when the chance that the verifier gets that
    far, which is the product of the draft's own probabilities in the block, is smaller (0: never).
    One more proposal pays when that chance exceeds the time of a draft step over that of a verifier
    step, so that ratio is the best value. A draft that samples does not stop: acceptance then is
    the overlap of two distributions, and flat ones overlap as well as peaked ones.
    """

    shortest: int = 4
    longest: int = 24
    confidence: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise InputError(
                f"Draft lengths need 1 <= shortest <= longest, got {self.shortest} and "
                f"{self.longest}."
            )
        if not 0 <= self.confidence <= 1:
            raise InputError(f"confidence is a probability from 0 to 1, got {self.confidence}.")

    def following(self, length: int, proposed: int, accepted: int) -> int:
        """The length after a block planned at ``length``, of which ``proposed`` tokens were drafted
        and the first ``accepted`` taken.
        """
        if accepted == proposed == length:
            return min(2 * length, self.longest)
        if 2 * accepted < proposed:
            return max(length // 2, self.shortest)
        return length
