"""Where a connector gets the source's KV from: a small protocol, and the store of one process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.errors import InputError, UnavailableError
from trtllm_kvmap.inject.connector.identity import HandoffIdentity
from trtllm_kvmap.mapper.pool import KvPool


@dataclass(frozen=True, slots=True)
class Offer:
    """What a scheduler must know before any block moves: the tokens ``source`` has read, from
    position 0, and how many first tokens of them the target's own exact KV is held for.
    """

    identity: HandoffIdentity
    token_ids: tuple[int, ...]
    source: Fingerprint
    exact_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SourceKv:
    """The source's KV: token t of the sequence lies in ``slots[t]`` (int64) of ``pool``.

    ``rope_length`` is the sequence length at which the keys were written (see mapper.Span).
    ``exact`` is the target's own KV of the first tokens, or None.
    """

    pool: KvPool
    slots: torch.Tensor
    rope_length: int
    exact: SinkEntry | None = None


class SourceBlocks(Protocol):
    """Holds the source's KV of hand-overs, by salt. ``find`` is asked by the scheduler and moves
    nothing; ``fetch`` by the worker, and may raise any error: the target then computes the tokens
    itself.
    """

    def find(self, salt: str) -> Offer | None: ...

    def fetch(self, salt: str) -> SourceKv: ...

    def done(self, salt: str) -> None:
        """No request will ask for this hand-over again; unknown salts are ignored."""

    def salts(self) -> tuple[str, ...]:
        """The hand-overs that are held or awaited; an engine may tell its connector only a hash of
        a request's salt.
        """


class InProcessBlocks:
    """SourceBlocks for a source and a target in one process: references, no copies. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Offer, SourceKv]] = {}
        self._lock = threading.Lock()

    def offer(self, offer: Offer, source: SourceKv) -> str:
        """Hold ``source`` until done(); returns the salt to send the target's request with.

        Raises InputError when the two do not fit each other, or the hand-over is held already.
        """
        if len(source.slots) < len(offer.token_ids):
            raise InputError(
                f"The offer names {len(offer.token_ids)} tokens but has slots for "
                f"{len(source.slots)}; give one slot per token."
            )
        exact = source.exact.token_ids if source.exact else ()
        if len(exact) != offer.exact_tokens or exact != offer.token_ids[: len(exact)]:
            raise InputError(
                f"The offer names {offer.exact_tokens} exact tokens; the target's own KV that came "
                f"with it is of {len(exact)}, which must be the first tokens of the offer."
            )
        salt = offer.identity.salt
        with self._lock:
            if salt in self._held:
                raise InputError(
                    f"The hand-over {offer.identity.handoff!r} is held already; a new hand-over "
                    f"needs a new name."
                )
            self._held[salt] = (offer, source)
        return salt

    def find(self, salt: str) -> Offer | None:
        with self._lock:
            held = self._held.get(salt)
        return held[0] if held else None

    def fetch(self, salt: str) -> SourceKv:
        with self._lock:
            held = self._held.get(salt)
        if held is None:
            raise UnavailableError(
                "The source's blocks of this hand-over are not held any more; the target computes "
                "the tokens itself. Offer them again to map them."
            )
        return held[1]

    def done(self, salt: str) -> None:
        with self._lock:
            self._held.pop(salt, None)

    def salts(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._held)
