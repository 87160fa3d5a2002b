"""What a source offers, and what makes a target refuse it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.checksum import CHECKSUMS, FASTEST
from trtllm_kvmap.exchange.messages import Address, Offer, Reason, Recall
from trtllm_kvmap.exchange.target_end import Refusal

LEASE_SECONDS = 30.0


def token_digest(token_ids: Sequence[int]) -> str:
    """sha256 of the ids as little-endian int64."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()


def make_offer(
    request_id: str,
    source: Fingerprint,
    token_ids: Sequence[int],
    rope_length: int,
    pool: BlockPool,
    address: Address,
    *,
    lease_seconds: float = LEASE_SECONDS,
    losses: Sequence[float] = (),
    recall: Recall | None = None,
) -> Offer:
    """The KV of ``token_ids``, from position 0, lies in blocks of ``pool``, which is exposed at
    ``address``; its keys were rotated as for a sequence of ``rope_length``.
    """
    return Offer(
        request_id=request_id,
        source=source,
        num_tokens=len(token_ids),
        token_digest=token_digest(token_ids),
        rope_length=rope_length,
        layout=pool.layout,
        dtype=pool.dtype,
        key_scale=pool.key_scale,
        value_scale=pool.value_scale,
        checksum=FASTEST,
        lease_ms=round(lease_seconds * 1000),
        address=address,
        losses=tuple(losses),
        recall=recall,
    )


@dataclass(frozen=True, slots=True)
class Expected:
    """What a target waits for: the KV that ``source`` made of the first tokens of ``token_ids``.

    ``kv_shape`` is the source's (num_layers, num_kv_heads, head_dim).
    """

    request_id: str
    source: Fingerprint
    kv_shape: tuple[int, int, int]
    token_ids: tuple[int, ...]


def refusal(
    offer: Offer, expected: Expected, landing: BlockPool, transports: Collection[str]
) -> Refusal | None:
    """Why ``offer`` cannot be taken into ``landing``, or None."""
    if offer.source != expected.source:
        return Refusal(
            Reason.WRONG_MODEL,
            "the offer is of another model than the map reads (configuration, weights or tokenizer "
            "differ)",
        )
    read, known = offer.num_tokens, len(expected.token_ids)
    if read > known or offer.token_digest != token_digest(expected.token_ids[:read]):
        return Refusal(
            Reason.WRONG_TOKENS, f"{read} tokens are offered that do not begin the {known} asked"
        )
    at, here = offer.layout, landing.layout
    shape = at.num_layers, at.num_kv_heads, at.head_dim
    given = (shape, at.tokens_per_block, offer.dtype)
    landing_shape = here.num_layers, here.num_kv_heads, here.head_dim
    wanted = (expected.kv_shape, here.tokens_per_block, landing.dtype)
    if given != wanted or landing_shape != expected.kv_shape:
        return Refusal(Reason.WRONG_LAYOUT, f"blocks are {given} and must be {wanted}")
    if offer.address.transport not in transports or offer.checksum not in CHECKSUMS:
        return Refusal(
            Reason.UNSUPPORTED,
            f"{offer.address.transport} with {offer.checksum} is offered; here are "
            f"{', '.join(transports)} with {', '.join(CHECKSUMS)}",
        )
    return None
