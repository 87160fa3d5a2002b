"""A prompt read by a source, and its blocks sent to a target that has a prompt to answer."""

from __future__ import annotations

import threading

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.remote import expected_blocks, read_to_offer
from trtllm_kvmap.exchange.block_pool import BlockPool
from trtllm_kvmap.exchange.channel import Listener, connect
from trtllm_kvmap.exchange.in_process import InProcessTransport
from trtllm_kvmap.exchange.receive import NotReceived, Received, receive_blocks
from trtllm_kvmap.exchange.send import send_blocks
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.layout import trtllm_layout


def pool_of(source: LoadedModel, num_blocks: int, tokens_per_block: int) -> BlockPool:
    layers, heads, head_dim = source.spec.kv_shape
    layout = trtllm_layout(num_blocks, layers, heads, tokens_per_block, head_dim)
    return BlockPool.allocate(layout, "float32")


def exchanged(
    source: LoadedModel,
    far: KvBridge,
    pool: BlockPool,
    landing: BlockPool,
    *,
    offered: list[int],
    prompt: list[int],
    **said: object,
) -> Received | NotReceived:
    """``offered`` read by the source into ``pool``, which is empty again afterwards, and sent to a
    target that has ``prompt`` to answer; ``said`` as for read_to_offer.
    """
    transport, listener, free = InProcessTransport(), Listener(), pool.num_free
    offer, ids = read_to_offer(source, offered, pool, transport.expose(pool), "r1", **said)
    sending = threading.Thread(
        target=lambda: send_blocks(connect(listener.address, 5.0), offer, pool, ids)
    )
    sending.start()
    expected = expected_blocks(far.kvmap, "r1", prompt)
    result = receive_blocks(listener, expected, {"in_process": transport}, landing)
    sending.join(10)
    listener.close()
    assert pool.num_free == free
    return result
