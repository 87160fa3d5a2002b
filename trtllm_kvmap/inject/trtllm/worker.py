"""The worker's half in TensorRT-LLM's terms. Every method is the engine's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from trtllm_kvmap.errors import KvMapError, MismatchError, UnavailableError
from trtllm_kvmap.inject.connector.orders import LoadOrder
from trtllm_kvmap.inject.trtllm.admission import require_engine
from trtllm_kvmap.inject.trtllm.bands import make_bands
from trtllm_kvmap.inject.trtllm.host import KvCacheConnectorWorker
from trtllm_kvmap.inject.trtllm.pool import view_pool
from trtllm_kvmap.inject.trtllm.process import this_target
from trtllm_kvmap.mapper.pool import KvPool
from trtllm_kvmap.models import read_fingerprint, read_spec


class KvMapWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """Maps source blocks straight into the engine's pool, on the stream of the forward pass, each
    band of layers just before the first of them runs.

    A load that fails after its tokens were promised fails the requests of its batch: the engine has
    no way to be told to compute them. What can be known beforehand is checked before the promise
    (StagedBlocks).
    """

    # Wide enough to remove the RoPE of a source layer once for many target layers, and to check a
    # span once for them; narrow enough that the first layer need not wait for the last.
    layers_per_band: ClassVar[int] = 8

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        target = this_target()
        self._spec = read_spec(llm_args.model)
        target.kvmap.target_fingerprint.require(read_fingerprint(llm_args.model), "target")
        require_engine(llm_args, self._spec, target.kvmap)
        self._tokens_per_block = llm_args.kv_cache_config.tokens_per_block
        self._bands = make_bands(
            target.kvmap, target.blocks, target.config.backend, self.layers_per_band
        )
        self._pool: KvPool | None = None
        self._orders: tuple[LoadOrder, ...] = ()
        self._loaded = 0  # bands loaded in this forward pass

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self._pool = view_pool(kv_cache_tensor, self._spec, self._tokens_per_block)

    def register_kv_cache_layout(self, layout: Any) -> None:
        raise MismatchError(
            "TensorRT-LLM's KV cache manager of version 2 describes several pools and preempts "
            "requests; set kv_cache_config.use_kv_cache_manager_v2 to False."
        )

    def start_load_kv(self, stream: Any) -> None:
        orders, self._loaded = self.get_connector_meta() or (), 0
        self._orders = tuple(orders)
        # The engine need not bind anew before a pass that has nothing new.
        self.bind_connector_meta(None)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        while self._orders and self._loaded < len(self._bands):
            band = self._bands[self._loaded]
            if band.first > layer_idx:
                break
            with _on(stream):
                for order in self._orders:
                    self._load(band.load, order)
            self._loaded += 1

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A target keeps nothing."""

    def wait_for_save(self, stream: Any) -> None:
        pending = self._orders and self._loaded < len(self._bands)
        self._orders = ()
        if pending:
            raise UnavailableError(
                f"The engine ran a forward pass with mapped tokens but called wait_for_layer_load "
                f"for no layer of {len(self._bands) - self._loaded} of {len(self._bands)} bands, "
                f"so it read blocks that hold nothing. Run prefill eagerly, without torch.compile."
            )

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return [], []

    def _load(self, load: Any, order: LoadOrder) -> None:
        if self._pool is None:
            raise MismatchError("TensorRT-LLM asks for a load before it has registered its pool.")
        try:
            load(order, self._pool)
        except KvMapError as error:
            raise UnavailableError(
                f"Request {order.request_id} was promised tokens {order.first} to {order.last} of "
                f"mapped KV, and they cannot be loaded ({error}); send it again without its salt."
            ) from error


def _on(stream: Any) -> AbstractContextManager[Any]:
    """Work inside goes to ``stream``; on a CPU there is none."""
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext()
