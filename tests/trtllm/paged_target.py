"""A real model that reads and writes its KV in a FakeKvCache's pool: what a layer attends to is
what the pool holds when that layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.layout import BlockTable


@dataclass(frozen=True)
class Work:
    """Run ``token_ids`` at the positions from ``first`` on, on the blocks of ``table``."""

    token_ids: list[int]
    first: int
    table: BlockTable


class _PagedLayer(DynamicLayer):
    def __init__(self, keys: torch.Tensor, values: torch.Tensor, work: Work) -> None:
        super().__init__()
        self._views, self._work, self._held = (keys, values), work, work.first
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self._held

    def update(self, keys, values, *args, **kwargs):
        end = self._held + keys.shape[-2]
        slots = torch.from_numpy(self._work.table.slot_mapping(0, end))
        size = self._work.table.tokens_per_block
        blocks, offsets = slots // size, slots % size
        seen = []
        for view, new in zip(self._views, (keys, values), strict=True):
            view[blocks[self._held :], :, offsets[self._held :]] = new[0].transpose(0, 1)
            seen.append(view[blocks, :, offsets].transpose(0, 1)[None])
        self._held = end
        return tuple(seen)


class PagedTarget:
    """``before`` and ``after`` are called with a layer's number around that layer's work, once for
    a whole batch, as hooks on decoder layers are.
    """

    def __init__(self, loaded: LoadedModel, blocks: torch.Tensor) -> None:
        self._loaded, self._blocks = loaded, blocks

    @torch.no_grad()
    def forward(
        self, batch: Sequence[Work], before: Callable[[int], None], after: Callable[[int], None]
    ) -> list[torch.Tensor]:
        """The logits after each work's last token."""
        # One pass for each request: the first passes the layers' beginnings, the last their ends.
        return [
            self._pass(
                work,
                before if index == 0 else None,
                after if index == len(batch) - 1 else None,
            )
            for index, work in enumerate(batch)
        ]

    def _pass(
        self,
        work: Work,
        before: Callable[[int], None] | None,
        after: Callable[[int], None] | None,
    ) -> torch.Tensor:
        cache = DynamicCache()
        cache.layers.extend(
            _PagedLayer(self._blocks[:, layer, 0], self._blocks[:, layer, 1], work)
            for layer in range(self._loaded.spec.num_layers)
        )
        handles = []
        for number, layer in enumerate(self._loaded.model.base_model.layers):
            if before is not None:
                handles.append(layer.register_forward_pre_hook(lambda *_, n=number: before(n)))
            if after is not None:
                handles.append(layer.register_forward_hook(lambda *_, n=number: after(n)))
        try:
            ids = torch.tensor([work.token_ids])
            positions = torch.arange(work.first, work.first + ids.shape[1])[None]
            out = self._loaded.model(
                input_ids=ids,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._loaded.cache_argument: cache},
            )
        finally:
            for handle in handles:
                handle.remove()
        return out.logits[0, -1].float()
