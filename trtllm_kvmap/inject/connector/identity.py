"""Who may see mapped blocks: the salt of a hand-over."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass

from trtllm_kvmap.errors import InputError


@dataclass(frozen=True, slots=True)
class HandoffIdentity:
    """What makes one hand-over of one conversation different from every other.

    ``tenant`` and ``conversation`` are the caller's names, ``target`` the target model's,
    ``kvmap_digest`` what KvMap.save returned, ``handoff`` a name of this hand-over that is used
    once. A later turn that goes on from the same hand-over has the same identity and so finds its
    own blocks; a new hand-over has a new one.
    """

    tenant: str
    conversation: str
    target: str
    kvmap_digest: str
    handoff: str

    def __post_init__(self) -> None:
        for field in ("conversation", "target", "kvmap_digest", "handoff"):
            if not getattr(self, field):
                raise InputError(
                    f"The identity of a hand-over has an empty {field}, so that others could have "
                    f"the same; name it."
                )

    @property
    def salt(self) -> str:
        """64 hex digits: the engine's ``cache_salt`` of every request of this hand-over. Mapped
        blocks are approximate, and engines commit them to the prefix cache as if they were exact;
        under this salt no other request can hit them.
        """
        sha = hashlib.sha256(b"trtllm_kvmap hand-over\n")
        for part in astuple(self):
            encoded = part.encode()
            # The length first, so that ("ab", "c") and ("a", "bc") differ.
            sha.update(len(encoded).to_bytes(8, "big") + encoded)
        return sha.hexdigest()
