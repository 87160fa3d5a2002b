"""The source's process: reads prompts and offers their blocks."""

from __future__ import annotations

import logging
import threading
from multiprocessing.connection import Connection

from trtllm_kvmap.decode.remote import read_to_offer
from trtllm_kvmap.errors import KvMapError, UnavailableError
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import connect
from trtllm_kvmap.exchange.messages import Offer
from trtllm_kvmap.exchange.send import ANSWER_SECONDS, send_blocks
from trtllm_kvmap.exchange.transport import allocate_pool, make_transport
from trtllm_kvmap.models import load_model
from trtllm_kvmap.serve.processes.work import CannotStart, PairSettings, ReadAndOffer
from trtllm_kvmap.spec.layout import KvLayout, trtllm_layout

log = logging.getLogger(__name__)
POOL_DTYPE = "float32"


def run_source(front: Connection, settings: PairSettings) -> None:
    """Until the front closes its pipe."""
    try:
        transport = make_transport(settings.transport)
        source = load_model(settings.source)
        layout = pool_layout(source.spec.kv_shape, settings)
        pool = allocate_pool(settings.transport, layout, POOL_DTYPE)
        exposed = transport.expose(pool)
    except KvMapError as error:
        front.send(CannotStart(str(error)))
        return
    front.send("ready")
    while True:
        try:
            work: ReadAndOffer = front.recv()
        except EOFError:
            return
        try:
            offer, block_ids = read_to_offer(
                source,
                work.token_ids,
                pool,
                exposed,
                work.request_id,
                guarded=work.guarded,
                recall=work.recall,
                lease_seconds=settings.lease_seconds,
            )
        except KvMapError as error:  # the target waits a while, and then reads the prompt
            log.warning("nothing is offered for %s: %s", work.request_id, error)
            continue
        # A lease may outlast the target, so the next prompt does not wait for this one's end.
        threading.Thread(
            target=_offer, args=(work.address, offer, pool, block_ids), daemon=True
        ).start()


def pool_layout(kv_shape: tuple[int, int, int], settings: PairSettings) -> KvLayout:
    """Room for the source's blocks: on its own side, and where they land on the target's."""
    layers, heads, head_dim = kv_shape
    return trtllm_layout(settings.num_blocks, layers, heads, settings.tokens_per_block, head_dim)


def _offer(
    address: tuple[str, int], offer: Offer, pool: BlockPool, block_ids: tuple[int, ...]
) -> None:
    try:
        channel = connect(address, ANSWER_SECONDS)
    except UnavailableError as error:
        pool.give_back(block_ids)
        log.warning("%s is offered to nobody: %s", offer.request_id, error)
        return
    sent = send_blocks(channel, offer, pool, block_ids)
    log.info("%s: %s %s", offer.request_id, sent.reason.value, sent.detail)
