"""What one model holds of a conversation, and where each entry comes from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_kvmap.inject.hf_cache import HfCache, fork, num_entries
from trtllm_kvmap.spec.plan import HandoffPlan


@dataclass(frozen=True, slots=True)
class Held:
    """One model's cache of a conversation, with its provenance.

    The first ``exact`` entries are what the model computes when it reads the conversation itself.
    Of the rest, those in ``mapped`` (ranges in order, apart) were written by a map; the others the
    model computed on top of mapped ones: its own, but approximate. ``logits`` float32 [vocab_size]
    are those after the last entry, None where they are not known.

    Never changed, only replaced, so that a conversation moves from one whole state to the next.
    """

    cache: HfCache
    exact: int
    mapped: tuple[range, ...] = ()
    logits: torch.Tensor | None = None

    @property
    def entries(self) -> int:
        return num_entries(self.cache)

    @property
    def approximate(self) -> int:
        return self.entries - self.exact

    @property
    def mapped_tokens(self) -> int:
        return sum(map(len, self.mapped))

    def cut(self, entries: int) -> Held:
        """The first ``entries`` tokens of it, or all when it has no more."""
        if entries >= self.entries:
            return self
        mapped = _clip(self.mapped, range(entries))
        return Held(fork(self.cache, entries), min(self.exact, entries), mapped)

    def read_on(self, cache: HfCache, logits: torch.Tensor | None = None) -> Held:
        """After the model has read more on top of it, which made it ``cache``."""
        exact = self.exact if self.approximate else num_entries(cache)
        return Held(cache, exact, self.mapped, logits)


def after_handoff(
    before: Held | None, plan: HandoffPlan, cache: HfCache, logits: torch.Tensor
) -> Held:
    """What the target holds after ``plan``, of which it had ``plan.spliced`` from ``before``."""
    kept = plan.spliced.stop
    mapped = _clip(before.mapped, range(kept)) if before else ()
    exact = min(before.exact, kept) if before else 0
    if plan.mapped:
        mapped = (*mapped, plan.mapped)
    if exact == kept:
        exact = plan.mapped.start if plan.mapped else num_entries(cache)
    return Held(cache, exact, mapped, logits)


def beyond(mapped: tuple[range, ...], entries: int, end: int) -> tuple[range, ...]:
    """The parts of ``mapped`` from ``entries`` to ``end``."""
    return _clip(mapped, range(entries, end))


def _clip(mapped: tuple[range, ...], span: range) -> tuple[range, ...]:
    clipped = (range(max(m.start, span.start), min(m.stop, span.stop)) for m in mapped)
    return tuple(part for part in clipped if part)
