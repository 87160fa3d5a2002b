"""A conversation that changes models: who has read what, and how exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache, empty_cache, fork, num_entries
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff


@dataclass(slots=True)
class _Held:
    """One model's cache of the conversation, and the logits after its last token where known.

    The first token that was mapped, ``mapped_from``, makes it and everything read after it
    approximate; what lies before it is exact and can be spliced.
    """

    cache: HfCache
    logits: torch.Tensor | None = None
    mapped_from: int | None = None

    @property
    def exact(self) -> int:
        return num_entries(self.cache) if self.mapped_from is None else self.mapped_from


class Session:
    """One conversation over ``models``, which share a tokenizer; the first of them begins.

    ``bridges`` say which hand-overs are possible. A model that comes back keeps what it had read
    itself and is given only the rest. Raises InputError for a bridge between models that are not
    of the conversation.
    """

    def __init__(self, models: Mapping[str, LoadedModel], bridges: Sequence[KvBridge]) -> None:
        if not models:
            raise InputError("A conversation needs at least one model.")
        self.models, self.bridges = dict(models), list(bridges)
        for bridge in self.bridges:
            for end in (bridge.source, bridge.target):
                if not any(end is loaded for loaded in self.models.values()):
                    raise InputError(
                        f"A bridge ends at {end.name}, which is none of the conversation's models "
                        f"({', '.join(self.models)}); give it the same loaded models."
                    )
        self.active = next(iter(self.models))
        self.token_ids: list[int] = []
        self._held: dict[str, _Held] = {}

    def add(self, text: str | Sequence[int]) -> None:
        """Append text or token ids to the conversation. Nothing is read before generate."""
        self.token_ids.extend(self._tokenise(text) if isinstance(text, str) else text)

    def generate(self, max_new_tokens: int, *, eos_token_ids: Collection[int] = ()) -> list[int]:
        """The active model's greedy reply, token ids, appended to the conversation."""
        self._require_tokens()
        loaded, held, logits = self.models[self.active], self._held_now(), self._read()
        cache = fork(held.cache)  # so that an interruption leaves the conversation as it was
        reply = generate(loaded, cache, logits, max_new_tokens, eos_token_ids=eos_token_ids)
        held.cache, held.logits = cache, None
        self.token_ids.extend(reply)
        return reply

    def switch(self, to: str, *, first_tokens: int = 1, repair_window: int = 32) -> Handoff:
        """Hand the conversation over to the model ``to``, which becomes the active one.

        Spliced: what ``to`` has read exactly. Repaired: the last ``repair_window`` tokens, and all
        that the active model has not read. Raises InputError when no bridge leads there or nothing
        has been said; the active model then stays.
        """
        self._require_tokens()
        bridge = self._bridge(to)
        source, target = self._held_now(), self._held.get(to)
        count = len(self.token_ids)
        plan = plan_handoff(
            count,
            spliced=0 if target is None else target.exact,
            first_tokens=first_tokens,
            repair_window=max(repair_window, count - num_entries(source.cache)),
        )
        handoff = bridge.hand_over(
            source.cache, self.token_ids, plan, None if target is None else target.cache
        )
        mapped_from = plan.mapped.start if plan.mapped else None
        self._held[to] = _Held(handoff.cache, handoff.logits, mapped_from)
        self.active = to
        return handoff

    def _held_now(self) -> _Held:
        return self._held.setdefault(self.active, _Held(empty_cache()))

    def _read(self) -> torch.Tensor:
        """The logits after the last token, once the active model has read what it had not."""
        held = self._held_now()
        unread = self.token_ids[num_entries(held.cache) :]
        if unread or held.logits is None:
            last = prefill(self.models[self.active], unread, fork(held.cache), logits_to_keep=1)
            held.cache, held.logits = last.cache, last.logits[-1]
        return held.logits

    def _tokenise(self, text: str) -> list[int]:
        first = not self.token_ids
        return self.models[self.active].tokenise(text, add_special_tokens=first)

    def _bridge(self, to: str) -> KvBridge:
        if to not in self.models:
            raise InputError(
                f"There is no model {to!r} in this conversation; there are "
                f"{', '.join(self.models)}."
            )
        if to == self.active:
            raise InputError(f"{to} is the active model already; nothing is handed over.")
        here, there = self.models[self.active], self.models[to]
        for bridge in self.bridges:
            if bridge.source is here and bridge.target is there:
                return bridge
        raise InputError(
            f"No bridge leads from {self.active} to {to}; give the session a KvBridge for them."
        )

    def _require_tokens(self) -> None:
        if not self.token_ids:
            raise InputError("The conversation is empty; add() a prompt first.")
