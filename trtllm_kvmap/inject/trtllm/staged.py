"""Source blocks that are in hand before anything is promised.

The engine takes an answer of matched tokens as given: it has no way to be told of a failed load.
So a hand-over's blocks are fetched, and looked at, when the scheduler asks for its offer; if that
fails there is no offer, and the target computes the prompt. Bring blocks from afar before the
request is sent: the engine's loop waits for ``fetch``.
"""

from __future__ import annotations

from collections import OrderedDict

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import MismatchError, UnavailableError
from trtllm_kvmap.inject.connector.blocks import Offer, SourceBlocks, SourceKv

# Salts of hand-overs that are over are remembered, so that a later turn is known as one of theirs.
REMEMBERED = 4096


class StagedBlocks:
    """SourceBlocks over another: ``find`` names only what ``fetch`` will give."""

    def __init__(self, blocks: SourceBlocks, kvmap: KvMap) -> None:
        self._blocks, self._kvmap = blocks, kvmap
        self._held: dict[str, SourceKv] = {}
        self._seen: OrderedDict[str, str] = OrderedDict()  # salt: why it could not be staged

    def salts(self) -> tuple[str, ...]:
        """Every salt that is held or awaited now, or was once."""
        for salt in self._blocks.salts():
            self._seen.setdefault(salt, "")
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return tuple(self._seen)

    def refusal(self, salt: str | None) -> str:
        """Why the last ``find`` of this salt found nothing; "" when it was not asked or did."""
        return self._seen.get(salt, "") if salt else ""

    def asked_by(self, salt: str | None) -> str | None:
        """The hand-over that a request of this salt asks for; None when it is no hand-over's."""
        return salt if salt in self._seen else None

    def find(self, salt: str) -> Offer | None:
        offer = self._blocks.find(salt)
        if offer is None:
            if salt in self._seen:
                self._seen[salt] = ""
            return None
        try:
            source = self._held.get(salt) or self._blocks.fetch(salt)
            self._require(offer, source)
        # Whatever went wrong, the target can compute the tokens itself.
        except Exception as error:
            self._seen[salt] = f"the source's blocks could not be had ({error})"
            self._blocks.done(salt)
            return None
        self._held[salt] = source
        self._seen[salt] = ""
        return offer

    def fetch(self, salt: str) -> SourceKv:
        if salt not in self._held:
            raise UnavailableError(
                "The source's blocks of this hand-over are not staged; ask find() for it first."
            )
        return self._held[salt]

    def done(self, salt: str) -> None:
        self._held.pop(salt, None)
        self._blocks.done(salt)

    def _require(self, offer: Offer, source: SourceKv) -> None:
        """Everything a load could fail of later."""
        if source.pool.kv_shape != self._kvmap.source.kv_shape:
            raise MismatchError(
                f"they hold (layers, KV heads, head_dim) = {source.pool.kv_shape}, the map reads "
                f"{self._kvmap.source.kv_shape}"
            )
        if len(source.slots) < len(offer.token_ids):
            raise MismatchError(
                f"they hold {len(source.slots)} tokens, {len(offer.token_ids)} were offered"
            )
        exact = source.exact.token_ids if source.exact else ()
        if exact[: offer.exact_tokens] != offer.token_ids[: offer.exact_tokens]:
            raise MismatchError("the target's own KV with them is of other tokens")
        highest = int(source.slots.max()) if len(source.slots) else -1
        if highest >= source.pool.num_slots or (len(source.slots) and int(source.slots.min()) < 0):
            raise MismatchError(f"their slots reach outside a pool of {source.pool.num_slots}")
