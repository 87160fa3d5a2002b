"""A hand-over whose source is in another process: what each side does besides moving blocks.

The target never depends on the source: whatever the exchange ends with, it has the prompt, and the
worst case is to read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import hand_over_guarded
from trtllm_kvmap.decode.guard.offered import hear, tell
from trtllm_kvmap.decode.guard.signals import WINDOW
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import KvMapError, NumericsError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.messages import Address, Offer
from trtllm_kvmap.exchange.offer import LEASE_SECONDS, Expected, make_offer
from trtllm_kvmap.exchange.receive import NotReceived, Received
from trtllm_kvmap.inject.connector.status import HandoffStatus
from trtllm_kvmap.inject.hf_blocks import pack_blocks, unpack_blocks
from trtllm_kvmap.inject.hf_cache import HfCache, Pass, record_pass, rope_length_of
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan, plan_handoff


def read_to_offer(
    source: LoadedModel,
    token_ids: Sequence[int],
    pool: BlockPool,
    exposed: Address,
    request_id: str,
    *,
    guarded: HandoffPlan | None = None,
    recall: bool = False,
    lease_seconds: float = LEASE_SECONDS,
) -> tuple[Offer, tuple[int, ...]]:
    """Let the source read ``token_ids`` into blocks of ``pool``; what send_blocks needs.

    Give it the tokens that will be mapped, and not those that the target computes anyway. Where the
    map carries a guard, give it the whole prompt and the target's plan as ``guarded``: the source's
    losses of the judged tokens go with the offer, and, with ``recall``, what it knows of the
    prompt.

    Raises UnavailableError when the pool has too few free blocks, InputError for tokens the source
    does not know or a plan for other ones, NumericsError for losses that are no numbers; then no
    block is held.
    """
    count = len(token_ids)
    kept = 1 if guarded is None else WINDOW
    read = prefill(source, token_ids, logits_to_keep=kept)
    losses: tuple[float, ...] = ()
    known = None
    if guarded is not None:
        losses, known = tell(source, read, token_ids, guarded, recall=recall)
    cache = read.cache
    length = rope_length_of(cache, source.spec.rope, count)
    block_ids = pool.take(-(-count // pool.layout.tokens_per_block))
    try:
        pack_blocks(cache, count, pool.blocks, block_ids)
    except KvMapError:
        pool.give_back(block_ids)
        raise
    offer = make_offer(
        request_id,
        source.fingerprint,
        token_ids,
        length,
        pool,
        exposed,
        lease_seconds=lease_seconds,
        losses=losses,
        recall=known,
    )
    return offer, block_ids


def expected_blocks(kvmap: KvMap, request_id: str, token_ids: Sequence[int]) -> Expected:
    """What the target waits for, to be mapped by ``kvmap``."""
    return Expected(
        request_id, kvmap.source_fingerprint, kvmap.source.kv_shape, tuple(map(int, token_ids))
    )


@dataclass(frozen=True, slots=True)
class Ready:
    """A target that is ready to decode: ``cache`` holds the whole prompt, ``logits`` float32
    [vocab_size] are those after its last token. ``unlike`` is what Guard.unlike says of the guard
    that was asked.
    """

    cache: HfCache
    logits: torch.Tensor
    status: HandoffStatus
    unlike: str = ""


def take_over(
    bridge: KvBridge,
    token_ids: Sequence[int],
    result: Received | NotReceived,
    landing: BlockPool,
    *,
    first_tokens: int = 1,
    repair_window: int = 32,
) -> Ready:
    """Go on from what receive_blocks returned: map and repair, or read the prompt.

    A guard that the map carries is asked as in hand_over_guarded. One that cannot judge, because it
    is damaged or the offer holds too little, lets nothing pass. The landing blocks are given back
    in any case. Raises InputError only for a prompt the target cannot read either.
    """
    count = len(token_ids)
    if isinstance(result, NotReceived):
        return reprefill(bridge.target, token_ids, f"{result.reason.value}: {result.detail}")
    offer = result.offer
    try:
        cache = unpack_blocks(
            bridge.source.spec,
            offer.num_tokens,
            landing.blocks,
            result.block_ids,
            key_scale=offer.key_scale,
            value_scale=offer.value_scale,
        )
        record_pass(cache, Pass(0, offer.num_tokens, offer.rope_length))
        repair_window = max(repair_window, count - offer.num_tokens)
        plan = plan_handoff(count, first_tokens=first_tokens, repair_window=repair_window)
        carried = bridge.kvmap.guard
        guard = None if carried is None else Guard.from_json(carried)
        losses, known = hear(offer)
        made = hand_over_guarded(
            bridge, guard, cache, token_ids, plan, source_losses=losses, source_known=known
        )
        handoff = made.handoff
        if not bool(torch.isfinite(handoff.logits).all()):
            raise NumericsError("The target computed NaN or infinity on the mapped cache.")
    except (KvMapError, RuntimeError) as error:  # torch says RuntimeError, also when out of memory
        return reprefill(bridge.target, token_ids, str(error))
    finally:
        landing.give_back(result.block_ids)
    if not plan.mapped:
        return Ready(
            handoff.cache,
            handoff.logits,
            HandoffStatus("fallback_reprefill", "the prompt is too short to map", count),
        )
    unlike = ""
    if guard is not None and made.signals is not None:
        unlike = guard.deciding(made.signals).unlike(first_tokens, repair_window, 0)
    if made.status == "fallback_reprefill":
        status = HandoffStatus("fallback_reprefill", f"guard: {made.reason}", count)
    else:
        mapped, sink = len(plan.mapped), handoff.sink_tokens
        status = HandoffStatus("applied", "", count, sink=sink, mapped=mapped)
    return Ready(handoff.cache, handoff.logits, status, unlike)


def reprefill(target: LoadedModel, token_ids: Sequence[int], reason: str) -> Ready:
    """The target reads the prompt itself."""
    read = prefill(target, token_ids, logits_to_keep=1)
    status = HandoffStatus("fallback_reprefill", reason, len(token_ids))
    return Ready(read.cache, read.logits[-1], status)
