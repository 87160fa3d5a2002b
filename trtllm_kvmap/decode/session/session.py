"""A conversation that changes models: who has read what, and how exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from trtllm_kvmap.calibrate.traffic import TrafficMoments
from trtllm_kvmap.decode.bridge import Handoff, KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.hop import Hop, HopGuard
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.prompt import require_room
from trtllm_kvmap.decode.session.counted import Counted, undisturbed
from trtllm_kvmap.decode.session.held import Held
from trtllm_kvmap.decode.session.mirror import Mirror
from trtllm_kvmap.decode.session.switch import carry_over, read_over
from trtllm_kvmap.decode.session.upgrade import Upgrade, first_disagreement, upgrade_chunk
from trtllm_kvmap.decode.speculation.speculate import speculate
from trtllm_kvmap.errors import InputError, KvMapError
from trtllm_kvmap.inject.hf_cache import HfCache, empty_cache, fork
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff


class Session:
    """One conversation over ``models``, which share a tokenizer; the first of them begins.

    ``bridges`` say which hand-overs are possible. Promises: a model that comes back keeps every
    entry it had, and only what it has not seen is mapped, so no entry is ever mapped twice and maps
    do not compound; what it had read itself before anything was mapped stays exact, bit for bit.

    ``max_mapped_tokens`` bounds the mapped entries of all models together: a switch that would go
    beyond it lets the target read for real instead. ``guard`` may object to a switch, with the same
    effect. Either is said in ``hops``, the record of all switches.

    ``traffic`` is offered what was added with consent, whenever the conversation goes from its
    source to its target. It counts in the background, and stands still while a method runs here.

    Raises InputError for a bridge between models that are not of the conversation.
    """

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        bridges: Sequence[KvBridge],
        *,
        guard: HopGuard | None = None,
        max_mapped_tokens: int | None = None,
        traffic: TrafficMoments | None = None,
    ) -> None:
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
        self.guard, self.max_mapped_tokens = guard, max_mapped_tokens
        self.counted = Counted(traffic)
        self.active = next(iter(self.models))
        self.token_ids: list[int] = []
        self.reply = range(0)
        self.held: dict[str, Held] = {}
        self.hops: list[Hop] = []
        self._mirrors: dict[str, Mirror] = {}

    @property
    def mapped_tokens(self) -> int:
        """The mapped entries that the caches of all models hold now."""
        return sum(held.mapped_tokens for held in self.held.values())

    def add(self, text: str | Sequence[int], *, consent: bool = False) -> None:
        """Append text or token ids to the conversation. Nothing is read before read or generate.

        ``consent``: whoever wrote it agrees that ``traffic`` counts it. From the first text without
        on, nothing of the conversation is counted, for what comes later tells of what came before.
        """
        self.counted.added(len(self.token_ids), consent)
        self.token_ids.extend(self._tokenise(text) if isinstance(text, str) else text)

    @undisturbed
    def read(self) -> None:
        """Let the active model read what it has not, ahead of a reply or a switch."""
        self._require_tokens()
        self._read(self.active)

    @undisturbed
    def generate(
        self,
        max_new_tokens: int,
        *,
        eos_token_ids: Collection[int] = (),
        draft: str | None = None,
    ) -> list[int]:
        """The active model's greedy reply, token ids, appended to the conversation.

        With ``draft``, the model of that name proposes blocks of it (decode.speculation) and has
        read the reply too when it is done: after a switch, the model left behind, which has the
        prompt. The reply is the same, near ties apart. Raises InputError for a draft that is not
        another model of the conversation, or has no room.
        """
        self._require_tokens()
        loaded, begin = self.models[self.active], len(self.token_ids)
        require_room(loaded, begin + max_new_tokens)
        if draft is not None:
            return self._generate_drafted(draft, max_new_tokens, eos_token_ids)
        held, logits = self._read(self.active)
        cache = fork(held.cache)  # so that an interruption leaves the conversation as it was
        said = list(self.token_ids)
        block = min((m.tokens_per_block for m in self._mirrors.values()), default=max_new_tokens)
        while True:
            left = begin + max_new_tokens - len(said)
            said += generate(loaded, cache, logits, min(block, left), eos_token_ids=eos_token_ids)
            self._follow(cache, said)
            if len(said) == begin + max_new_tokens or said[-1] in eos_token_ids:
                break
            logits = prefill(loaded, said[-1:], cache, logits_to_keep=1).logits[-1]
        self.held[self.active] = held.read_on(cache)
        return self._say(said)

    @undisturbed
    def mirror(self, to: str, *, first_tokens: int = 1, tokens_per_block: int = 32) -> None:
        """Keep the model ``to`` in hot standby (session.mirror): each block that the active model
        fills is mapped for it at once, so that a switch there costs only the repair. Ends when the
        conversation changes models. Raises InputError when no bridge leads there.
        """
        bridge, held = self._bridge(to), self.held.get(to)
        mirror = Mirror(
            bridge,
            None if held is None else held.cache,
            first_tokens=first_tokens,
            tokens_per_block=tokens_per_block,
        )
        if self.active in self.held:
            mirror.follow(self.held[self.active].cache, self.token_ids)
        self._mirrors[to] = mirror

    @undisturbed
    def switch(self, to: str, *, first_tokens: int = 1, repair_window: int = 32) -> Handoff:
        """Hand the conversation over to the model ``to``, which becomes the active one.

        Spliced: what ``to`` holds. Repaired: the last ``repair_window`` tokens, and all that the
        active model has not read. Raises InputError when no bridge leads there or nothing has been
        said; the active model then stays.
        """
        self._require_tokens()
        bridge, before = self._bridge(to), self.held.get(to)
        source = self.held.get(self.active) or Held(empty_cache(), 0)
        plan = plan_handoff(
            len(self.token_ids),
            spliced=before.entries if before else 0,
            first_tokens=first_tokens,
            repair_window=max(repair_window, len(self.token_ids) - source.entries),
        )
        wanted = self.mapped_tokens + len(plan.mapped)
        if plan.mapped and self.max_mapped_tokens is not None and wanted > self.max_mapped_tokens:
            reason = f"{wanted} mapped tokens would exceed the budget of {self.max_mapped_tokens}"
            carried = read_over(bridge, self.token_ids, source, before, reason=reason)
        else:
            carried = carry_over(
                bridge,
                self.token_ids,
                source,
                before,
                plan,
                mirror=self._mirrors.get(to),
                guard=self.guard,
            )
        self.held[to] = carried.held
        self.hops.append(
            Hop(
                source=self.active,
                target=to,
                num_tokens=len(self.token_ids),
                kept=len(carried.handoff.plan.spliced),
                exact=carried.exact,
                mapped=len(carried.handoff.plan.mapped),
                outcome="fallback_reprefill" if carried.reason else "applied",
                reason=carried.reason,
                drift=carried.drift,
            )
        )
        self.counted.handed_over(bridge, self.token_ids)
        self.active, self.reply = to, range(0)
        self._mirrors.clear()
        return carried.handoff

    @undisturbed
    def upgrade(self, *, chunk_tokens: int = 128, verify: bool = False) -> Upgrade:
        """Spend one idle chunk on making the active model's cache exact (session.upgrade).

        Call it until ``approximate`` is 0; replies may be generated in between. With ``verify`` the
        reply is held against what the model says in this chunk: from the first token that differs
        on it is withdrawn, the model's own token stands there instead, and the cache is exact. Only
        a reply that ends the conversation is verified; one that has been answered stands.
        """
        held = self.held.get(self.active)
        if held is None or not held.approximate:
            return Upgrade(0)
        loaded = self.models[self.active]
        done = upgrade_chunk(loaded, held, self.token_ids, chunk_tokens=chunk_tokens)
        for mirror in self._mirrors.values():
            mirror.cut(done.chunk.start)
        emitted = self.reply if verify and self.reply.stop == len(self.token_ids) else range(0)
        found = first_disagreement(done, self.token_ids, emitted)
        if found is None:
            self.held[self.active] = done.held
            return Upgrade(done.held.approximate)
        position, token = found
        withdrawn = tuple(self.token_ids[position:])
        self.held = {
            name: (done.held if name == self.active else other).cut(position)
            for name, other in self.held.items()
        }
        self.token_ids[position:] = [token]
        self.reply = range(self.reply.start, position + 1)
        return Upgrade(0, withdrawn)

    def _generate_drafted(
        self, draft: str, max_new_tokens: int, eos_token_ids: Collection[int]
    ) -> list[int]:
        self._require_other(draft)
        require_room(self.models[draft], len(self.token_ids) + max_new_tokens)
        (held, logits), (helper, _) = self._read(self.active), self._read(draft)
        self._mirrors.pop(draft, None)  # what it reads itself need not be mapped for it
        done = speculate(
            self.models[draft],
            self.models[self.active],
            helper.cache,
            held.cache,
            logits,
            max_new_tokens,
            eos_token_ids=eos_token_ids,
        )
        said = self.token_ids + done.rows[0]
        self._follow(done.verifier_cache, said)
        self.held[self.active] = held.read_on(done.verifier_cache)
        self.held[draft] = helper.read_on(done.draft_cache)
        return self._say(said)

    def _say(self, said: list[int]) -> list[int]:
        """The conversation is ``said`` now; what is new in it."""
        begin = len(self.token_ids)
        # Another call without anything added goes on with the same reply.
        self.reply = range(self.reply.start if self.reply.stop == begin else begin, len(said))
        self.token_ids = said
        return said[begin:]

    def _read(self, name: str) -> tuple[Held, torch.Tensor]:
        """What the model ``name`` holds, and the logits after the last token, once it has read what
        it had not.
        """
        held = self.held.get(name) or Held(empty_cache(), 0)
        logits, begin = held.logits, held.entries
        if begin < len(self.token_ids) or logits is None:
            # Logits that are not known any more come with the last token, read once again.
            begin = min(begin, len(self.token_ids) - 1)
            cache, unread = fork(held.cache, begin), self.token_ids[begin:]
            last = prefill(self.models[name], unread, cache, logits_to_keep=1)
            logits = last.logits[-1]
            held = self.held[name] = held.cut(begin).read_on(cache, logits)
            if name == self.active:
                self._follow(cache, self.token_ids)
        return held, logits

    def _follow(self, cache: HfCache, said: Sequence[int]) -> None:
        for to, mirror in list(self._mirrors.items()):
            try:
                mirror.follow(cache, said)
            except KvMapError:  # no reply fails for a standby; a switch there will say why
                del self._mirrors[to]

    def _tokenise(self, text: str) -> list[int]:
        first = not self.token_ids
        return self.models[self.active].tokenise(text, add_special_tokens=first)

    def _require_other(self, name: str) -> None:
        if name not in self.models:
            raise InputError(
                f"There is no model {name!r} in this conversation; there are "
                f"{', '.join(self.models)}."
            )
        if name == self.active:
            raise InputError(f"{name} is the active model already; name another one.")

    def _bridge(self, to: str) -> KvBridge:
        self._require_other(to)
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
