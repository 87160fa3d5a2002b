"""A map in bands of target layers, so that the first layers are mapped before the last ones.

A band of one layer lets a layer start soonest; a wider one removes the RoPE of each source layer it
reads for all its layers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.inject.connector.blocks import Offer, SourceBlocks, SourceKv
from trtllm_kvmap.inject.connector.orders import LoadOrder
from trtllm_kvmap.inject.connector.worker import HandoffWorker
from trtllm_kvmap.mapper.pool import KvPool


@dataclass(frozen=True, slots=True)
class Band:
    """Loads the target layers ``first`` .. ``last`` - 1."""

    first: int
    last: int
    worker: HandoffWorker

    def load(self, order: LoadOrder, target: KvPool) -> None:
        part = replace(
            target,
            keys=target.keys[self.first : self.last],
            values=target.values[self.first : self.last],
        )
        self.worker.load(order, part)


def make_bands(
    kvmap: KvMap, blocks: SourceBlocks, backend: str, layers_per_band: int
) -> tuple[Band, ...]:
    """The whole map, in order of its target layers."""
    total = kvmap.target.num_layers
    bands = []
    for first in range(0, total, layers_per_band):
        last = min(first + layers_per_band, total)
        part = layers_of(kvmap, first, last)
        worker = HandoffWorker(part, _BandBlocks(blocks, first, last), backend)
        bands.append(Band(first, last, worker))
    return tuple(bands)


def layers_of(kvmap: KvMap, first: int, last: int) -> KvMap:
    """The map onto the target layers ``first`` .. ``last`` - 1 alone, counted from 0; its weights
    are those of ``kvmap``, not copies.
    """
    return replace(
        kvmap,
        target=replace(kvmap.target, num_layers=last - first),
        groups=tuple(
            replace(group, layer=group.layer - first)
            for group in kvmap.groups
            if first <= group.layer < last
        ),
        sinks=tuple(_entry_layers(entry, first, last) for entry in kvmap.sinks),
    )


def _entry_layers(entry: SinkEntry, first: int, last: int) -> SinkEntry:
    return replace(entry, keys=entry.keys[first:last], values=entry.values[first:last])


@dataclass(frozen=True, slots=True)
class _BandBlocks:
    """The blocks of a whole hand-over, with the target's own KV of one band."""

    blocks: SourceBlocks
    first: int
    last: int

    def find(self, salt: str) -> Offer | None:
        return self.blocks.find(salt)

    def fetch(self, salt: str) -> SourceKv:
        source = self.blocks.fetch(salt)
        if source.exact is None:
            return source
        return replace(source, exact=_entry_layers(source.exact, self.first, self.last))

    def salts(self) -> tuple[str, ...]:
        return self.blocks.salts()

    def done(self, salt: str) -> None:
        self.blocks.done(salt)
