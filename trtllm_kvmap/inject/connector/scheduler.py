"""The scheduler's half of a connector: what each request is offered, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.inject.connector.blocks import Offer, SourceBlocks
from trtllm_kvmap.inject.connector.orders import FailedLoad, LoadOrder
from trtllm_kvmap.inject.connector.provenance import Provenance
from trtllm_kvmap.inject.connector.status import HandoffStatus
from trtllm_kvmap.spec.layout import BlockTable
from trtllm_kvmap.spec.plan import plan_handoff


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the core reads of an engine's request.

    ``token_ids`` is the prompt; ``salt`` the cache salt it was sent with (None: none). ``handoff``
    is the salt of the hand-over it asks for; None: whatever its own salt stands for.
    """

    request_id: str
    token_ids: Sequence[int]
    salt: str | None = None
    handoff: str | None = None


@dataclass(slots=True)
class _Tracked:
    """One request between its first match and its end."""

    handoff: str | None  # the salt of the offer it uses
    salt: str | None  # the salt its blocks are committed under
    token_ids: tuple[int, ...]
    status: HandoffStatus
    end: int  # tokens before it are spliced, from the sink table, or mapped; 0: none are offered
    spliced: int
    sink: int
    exact: int  # the first tokens that are exact
    loaded: int = 0  # tokens before it are in the engine's blocks, or ordered to be
    block_ids: list[int] = field(default_factory=list)
    ordered: set[int] = field(default_factory=set)  # blocks with a load that is not known to fail
    marked: set[bytes] = field(default_factory=set)  # see Provenance.note
    started: bool = False  # the engine gave it blocks once


class HandoffScheduler:
    """Per request: match (again after a preemption, or when the engine found no room), allocated,
    take_orders once per engine step, failed when the worker says so, finished at its end however it
    ends. Nothing here moves a byte or knows an engine.

    ``first_tokens`` and ``repair_window`` are those of spec.plan: so many first tokens come from
    the map's sink table if it has them, so many last ones, rounded up to a block, are left to the
    target.
    """

    def __init__(
        self,
        kvmap: KvMap,
        kvmap_digest: str,
        blocks: SourceBlocks,
        *,
        tokens_per_block: int,
        first_tokens: int = 1,
        repair_window: int = 32,
    ) -> None:
        plan_handoff(0, first_tokens=first_tokens, repair_window=repair_window)  # checks both
        self._kvmap, self._digest, self._blocks = kvmap, kvmap_digest, blocks
        self._tokens_per_block = tokens_per_block
        self._first_tokens, self._repair_window = first_tokens, repair_window
        self._provenance = Provenance(tokens_per_block)
        self._tracked: dict[str, _Tracked] = {}

    def match(self, request: RequestView, num_computed: int) -> int:
        """How many tokens after the ``num_computed`` in the engine's own cache it need not compute:
        max(0, floor((n - repair_window) / tokens_per_block) * tokens_per_block - num_computed),
        less where the source has read fewer; 0 for a request that is not, or cannot be, handed
        over.

        The engine may ask again until it has room, and does so after it has preempted a request
        that had begun: the plan of that one stays, so that the same tokens are mapped again.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.started:
            tracked = self._admit(request, num_computed)
            if tracked is None:
                return 0
            self._tracked[request.request_id] = tracked
        tracked.loaded = num_computed
        tracked.block_ids.clear()
        tracked.ordered.clear()
        if tracked.status.state != "applied":
            return 0
        return max(tracked.end - num_computed, 0)

    def allocated(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The engine gave these blocks to the request, after those it gave before. They may come in
        any number of calls; -1 stands for a block that needs no load.
        """
        if request_id in self._tracked:
            self._tracked[request_id].started = True
            self._tracked[request_id].block_ids.extend(block_ids)

    def take_orders(self) -> tuple[LoadOrder, ...]:
        """The loads that can be done now: of every request the tokens that have blocks."""
        orders = []
        for request_id, tracked in self._tracked.items():
            have = len(tracked.block_ids) * self._tokens_per_block
            last = min(tracked.end, have)
            if not tracked.handoff or tracked.status.state != "applied" or last <= tracked.loaded:
                continue
            self._note(tracked, tracked.token_ids[:last])
            orders.append(
                LoadOrder(
                    request_id=request_id,
                    salt=tracked.handoff,
                    first=tracked.loaded,
                    last=last,
                    spliced=tracked.spliced,
                    sink=tracked.sink,
                    token_ids=tracked.token_ids[:last],
                    table=BlockTable(tuple(tracked.block_ids), self._tokens_per_block),
                )
            )
            tracked.ordered.update(orders[-1].block_ids)
            tracked.loaded = last
        return tuple(orders)

    def declined(self, request_id: str, reason: str) -> None:
        """The engine will not take the tokens that match() named, or could name none, for this
        reason. A request that goes on from its own blocks has none to decline.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or (tracked.status.state == "applied" and tracked.end <= tracked.loaded):
            return
        self._fall_back(request_id, reason)

    def failed(self, load: FailedLoad) -> None:
        """The worker could not fill these blocks, and the engine will compute their tokens. Blocks
        of an earlier load stand, and what follows them is approximate.
        """
        if load.request_id in self._tracked:
            self._tracked[load.request_id].ordered.difference_update(load.block_ids)
        self._fall_back(load.request_id, load.reason)

    def status(self, request_id: str) -> HandoffStatus | None:
        """None for a request that has nothing to do with a hand-over."""
        tracked = self._tracked.get(request_id)
        return tracked.status if tracked else None

    def finished(self, request_id: str, token_ids: Sequence[int]) -> HandoffStatus | None:
        """The request is over (done, cancelled or failed), with these tokens, prompt and answer.
        Returns its last status.
        """
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return None
        self._note(tracked, token_ids)
        if tracked.handoff and not self._shares(tracked):
            self._blocks.done(tracked.handoff)
        return tracked.status

    def _admit(self, request: RequestView, num_computed: int) -> _Tracked | None:
        handoff = request.handoff or request.salt
        offer = self._blocks.find(handoff) if handoff else None
        if offer is None and request.handoff is None:
            return None
        ids = tuple(int(token) for token in request.token_ids)
        exact = num_computed  # without a salt every block is exact
        if request.salt:
            exact = self._provenance.exact_tokens(request.salt, ids[:num_computed])
        status = HandoffStatus(
            "applied",
            "",
            prompt=len(ids),
            already_exact=exact,
            already_approximate=num_computed - exact,
        )
        tracked = _Tracked(
            handoff=handoff if request.salt == handoff and offer else None,
            salt=request.salt,
            token_ids=ids,
            status=status,
            end=0,
            spliced=0,
            sink=0,
            # What is computed on top of exact tokens alone is exact.
            exact=len(ids) if exact == num_computed else exact,
        )
        refusal = self._refusal(request, offer)
        if refusal is not None:
            tracked.status = replace(status, state="unsupported", reason=refusal)
            return tracked
        if offer is not None:
            self._plan(tracked, offer, num_computed)
        if not tracked.end:
            self._settle_without_load(tracked, offer)
        return tracked

    def _refusal(self, request: RequestView, offer: Offer | None) -> str | None:
        if request.handoff is not None and request.handoff != request.salt:
            return (
                "the request's cache_salt is not that of the hand-over it asks for, so its mapped "
                "blocks would answer others; send HandoffIdentity.salt as cache_salt"
            )
        if offer is None:
            return None
        if offer.identity.kvmap_digest != self._digest:
            return "the hand-over was offered for another map than the one this engine has loaded"
        if offer.source != self._kvmap.source_fingerprint:
            return "the offer is of another source model than the map was fitted for"
        return None

    def _plan(self, tracked: _Tracked, offer: Offer, num_computed: int) -> None:
        """Choose what is spliced, taken from the sink table and mapped."""
        ids, size = tracked.token_ids, self._tokens_per_block
        shared = _shared(offer.token_ids, ids)
        limit = min(self._kvmap.source.max_positions, self._kvmap.target.max_positions)
        entry = self._kvmap.sink_for(ids)
        known = min(len(entry.token_ids) if entry else 0, self._first_tokens)
        plan = plan_handoff(
            len(ids),
            spliced=min(offer.exact_tokens, shared),
            first_tokens=known,
            repair_window=self._repair_window,
            tokens_per_block=size,
        )
        end = min(plan.mapped.stop, shared, limit) // size * size
        if end <= num_computed:
            return
        spliced, sink = min(plan.spliced.stop, end), min(plan.first.stop, end)
        tracked.end, tracked.spliced, tracked.sink = end, spliced, sink
        if end > max(sink, num_computed):
            # Nothing after the first mapped token is exact.
            tracked.exact = min(tracked.exact, max(sink, num_computed))
        tracked.status = replace(
            tracked.status,
            spliced=max(spliced - num_computed, 0),
            sink=max(sink - max(spliced, num_computed), 0),
            mapped=end - max(sink, num_computed),
            sink_missed=max(min(self._first_tokens, end) - max(sink, num_computed), 0),
        )

    def _settle_without_load(self, tracked: _Tracked, offer: Offer | None) -> None:
        """Nothing is left to load: the conversation's own blocks serve, or the target computes."""
        status = tracked.status
        if status.already_approximate:
            reason = "the conversation's own blocks already held what was mapped before"
            tracked.status = replace(status, reason=reason)
            return
        if offer is None:
            reason = "no source blocks are held for this hand-over; offer them before the request"
        elif status.already_exact:
            reason = "the engine's cache already held exactly what was to be mapped"
        else:
            reason = (
                f"the source has read {_shared(offer.token_ids, tracked.token_ids)} first tokens "
                f"of this prompt of {status.prompt}; with {self._repair_window} left to the target "
                f"there is no whole block of {self._tokens_per_block} to map"
            )
        tracked.status = replace(status, state="fallback_reprefill", reason=reason)

    def _fall_back(self, request_id: str, reason: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.status.state == "unsupported":
            return
        approximate = tracked.ordered or tracked.status.already_approximate
        if not approximate and not self._shares(tracked):
            tracked.exact = len(tracked.token_ids)
            self._provenance.retract(tracked.salt or "", tracked.marked)
        tracked.status = replace(
            tracked.status,
            state="fallback_reprefill",
            reason=reason,
            spliced=0,
            sink=0,
            mapped=len(tracked.ordered) * self._tokens_per_block,
            sink_missed=0,
        )

    def _note(self, tracked: _Tracked, token_ids: Sequence[int]) -> None:
        if tracked.salt:
            # Whatever follows an exact prompt was computed on top of it.
            exact = len(token_ids) if tracked.exact >= len(tracked.token_ids) else tracked.exact
            self._provenance.note(tracked.salt, token_ids, exact, tracked.marked)

    def _shares(self, tracked: _Tracked) -> bool:
        """Whether another request that is not over uses the same hand-over."""
        return any(
            t is not tracked and t.handoff == tracked.handoff for t in self._tracked.values()
        )


def _shared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many first tokens are equal."""
    length = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            break
        length += 1
    return length
