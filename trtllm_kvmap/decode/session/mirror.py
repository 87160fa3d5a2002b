"""Hot standby: while the source decodes, each block that fills is mapped, so that a switch costs
only the repair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.decode.admission import check_request
from trtllm_kvmap.decode.bridge import Handoff, KvBridge, complete, stopwatch, timed
from trtllm_kvmap.decode.first import add_first
from trtllm_kvmap.decode.prompt import Prompt
from trtllm_kvmap.decode.session.prefix import common_prefix
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import (
    HfCache,
    Pass,
    empty_cache,
    fork,
    make_cache,
    num_entries,
    put_cache,
    record_pass,
    view_pool,
)
from trtllm_kvmap.mapper.contract import Span
from trtllm_kvmap.spec.plan import HandoffPlan


class Mirror:
    """The target's cache of one conversation, kept up while the source goes on.

    Promises: hand_over gives what ``bridge.hand_over`` gives with the same plan, bit for bit where
    heads are copied and to float32 rounding where they are multiplied (products of other shapes);
    and only the repair is left to do then, for the target's cache grows in room of its own and
    none of it is copied at the switch. A repair window shorter than a block leaves at most one
    block to be mapped.

    ``held`` is what the target has read already (None: nothing); it is kept as it is and copied
    once. The first ``first_tokens`` are the target's own. When frequencies change with the length
    of the conversation, everything but ``held`` is mapped again, as a map at the switch would.
    """

    def __init__(
        self,
        bridge: KvBridge,
        held: HfCache | None = None,
        *,
        first_tokens: int = 1,
        tokens_per_block: int = 32,
    ) -> None:
        if tokens_per_block < 1 or first_tokens < 0:
            raise InputError(
                f"A mirror needs tokens_per_block of at least 1 and first_tokens of at least 0; "
                f"got {tokens_per_block} and {first_tokens}."
            )
        self.bridge = bridge
        self.first_tokens, self.tokens_per_block = first_tokens, tokens_per_block
        self._held = empty_cache() if held is None else fork(held)
        self._room = self._held
        self._token_ids: list[int] = []  # of the entries behind _held
        self._regime: int | None = None
        self._sink_tokens = 0

    @property
    def kept(self) -> int:
        """How many tokens the target had read itself when the mirror began."""
        return num_entries(self._held)

    @property
    def entries(self) -> int:
        """How many tokens of the conversation stand ready for the target."""
        return self.kept + len(self._token_ids)

    def follow(self, source_cache: HfCache, token_ids: Sequence[int]) -> None:
        """Map every whole block that ``source_cache`` holds and the mirror does not.

        ``token_ids`` is the conversation so far, one sequence; where it differs from what was
        followed before, it is mapped anew. Call it as the source goes on, from one thread at a
        time; ``source_cache`` is read, never changed. Raises as KvBridge.hand_over.
        """
        ready = min(num_entries(source_cache), len(token_ids))
        self._map_to(source_cache, token_ids, ready - ready % self.tokens_per_block)

    def cut(self, entries: int) -> None:
        """Forget all but the first ``entries`` tokens, because the source's have changed."""
        if entries < self.entries:
            self._room = fork(self._room, entries)
            if entries < self.kept:
                self._held = self._room
            del self._token_ids[max(entries - self.kept, 0) :]

    def hand_over(
        self,
        source_cache: HfCache,
        token_ids: Sequence[int],
        plan: HandoffPlan,
        *,
        keep_logits: int = 1,
    ) -> Handoff:
        """The switch: maps what is not ready and repairs. The mirror may go on afterwards.

        Raises InputError, beside what KvBridge.hand_over raises, for a plan that splices or
        computes other first tokens than the mirror has.
        """
        bridge = self.bridge
        if not plan.mapped:
            held = self._held if plan.spliced else None
            return bridge.hand_over(source_cache, token_ids, plan, held, keep_logits=keep_logits)
        first = range(self.kept, max(self.kept, self.first_tokens))
        if (plan.spliced, plan.first) != (range(self.kept), first):
            raise InputError(
                f"The plan splices {len(plan.spliced)} tokens and maps from {plan.first.stop}; the "
                f"mirror holds {self.kept} and maps from {first.stop}. Plan with "
                f"spliced={self.kept} and first_tokens={self.first_tokens}."
            )
        prompt = Prompt.of(token_ids, device=bridge.target.device)
        check_request(
            bridge.kvmap, bridge.source, bridge.target, prompt, plan, source_cache, self._held
        )
        seconds = stopwatch()
        with timed(seconds, "map"):
            self._map_to(source_cache, token_ids, plan.mapped.stop)
            ready = fork(self._room, plan.mapped.stop)
        return complete(bridge.target, prompt, plan, ready, self._sink_tokens, seconds, keep_logits)

    def _map_to(self, source_cache: HfCache, token_ids: Sequence[int], stop: int) -> None:
        """Entries up to ``stop``, where they are not there yet."""
        bridge, target = self.bridge, self.bridge.target
        count = len(token_ids)
        length = target.rope_length(count)
        regime = target.spec.rope.regime(length)
        said = list(token_ids[self.kept : self.entries])
        if said != self._token_ids:
            self.cut(self.kept + common_prefix(said, self._token_ids))
        if self._regime not in (None, regime):
            self.cut(self.kept)
        begun = self.entries
        first = range(begun, max(begun, self.first_tokens))
        if stop <= first.stop:
            return
        prompt = Prompt.of(token_ids, device=target.device)
        plan = HandoffPlan(count, range(begun), first, range(first.stop, stop), range(stop, count))
        own = fork(self._room, begun)
        source_length = check_request(
            bridge.kvmap, bridge.source, target, prompt, plan, source_cache, own
        )
        room = self._room_for(stop)
        if first:
            own, self._sink_tokens = add_first(bridge.kvmap, target, prompt, plan, own)
            put_cache(room, own)
        tokens = torch.arange(first.stop, stop, device=target.device)
        span = Span(
            source_slots=tokens,
            target_slots=tokens,
            positions=tokens,
            token_ids=prompt.token_ids[0, first.stop : stop],
            source_length=source_length,
            target_length=length,
        )
        bridge.mapper.map_kv(view_pool(source_cache), view_pool(room), span)
        if target.spec.rope.length_dependent:
            record_pass(room, Pass(first.stop, stop, length))
        self._room, self._regime = room, regime
        self._token_ids.extend(token_ids[begun:stop])

    def _room_for(self, entries: int) -> HfCache:
        """Room for ``entries`` tokens, doubled when it runs out, so that growing stays linear."""
        if num_entries(self._room) >= entries:
            return self._room
        target = self.bridge.target
        room = make_cache(
            target.spec,
            max(entries, 2 * self.entries),
            dtype=target.model.dtype,
            device=target.device,
        )
        put_cache(room, fork(self._room, self.entries))
        return room
