"""What a connector's cases stand on: a fitted pair, source blocks to offer, and what the hf lane
answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.native import SinkEntry
from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.fit import fit
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.inject.connector.blocks import InProcessBlocks, Offer, SourceKv
from trtllm_kvmap.inject.connector.identity import HandoffIdentity
from trtllm_kvmap.inject.hf_cache import HfCache, fork, num_entries, view_pool
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.plan import HandoffPlan
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import make_document

FIRST_TOKENS, REPAIR_WINDOW = 4, 20


class Breakable(InProcessBlocks):
    """The store of one process, whose blocks can be made to fail when a worker fetches them."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()

    def fetch(self, salt: str) -> SourceKv:
        if salt in self.broken:
            raise UnavailableError("The source is gone; the target computes the tokens itself.")
        return super().fetch(salt)


@dataclass(frozen=True)
class Stream:
    """Greedy tokens, the logits each was chosen from, and the cache behind all but the last."""

    token_ids: list[int]
    logits: torch.Tensor
    cache: HfCache


@dataclass
class World:
    """tiny-s reads, tiny-m answers; everything a case needs besides a host."""

    source: LoadedModel
    target: LoadedModel
    kvmap: KvMap
    digest: str
    path: Path
    blocks: Breakable
    offered: int = field(default=0)

    def prompt(self, seed: int, words: int = 150) -> list[int]:
        """A document and the stem of a question about it."""
        document = make_document(np.random.default_rng(seed), words, 8, 1)
        return self.source.tokenise(f"{document.text} {document.questions[0].stem}")

    def identity(self, **changes: str) -> HandoffIdentity:
        """A new one every time, unless ``handoff`` is given."""
        self.offered += 1
        names = {
            "tenant": "tests",
            "conversation": "one",
            "target": self.target.name,
            "kvmap_digest": self.digest,
            "handoff": str(self.offered),
        }
        return HandoffIdentity(**{**names, **changes})

    def offer(
        self,
        token_ids: list[int],
        *,
        read: list[int] | None = None,
        identity: HandoffIdentity | None = None,
        exact: int = 0,
    ) -> str:
        """Offer the source's KV of ``token_ids`` (or, which is wrong, of ``read``) and ``exact``
        first tokens of the target's own; returns the salt.
        """
        read = token_ids if read is None else read
        pool = view_pool(prefill(self.source, read).cache)
        own = None
        if exact:
            held = view_pool(prefill(self.target, token_ids[:exact]).cache)
            keys, values = (torch.stack(views)[:, 0] for views in (held.keys, held.values))
            own = SinkEntry(tuple(token_ids[:exact]), keys, values)
        count = len(token_ids)
        return self.blocks.offer(
            Offer(
                identity or self.identity(),
                tuple(token_ids),
                self.source.fingerprint,
                exact_tokens=exact,
            ),
            SourceKv(pool, torch.arange(count), rope_length=count, exact=own),
        )

    def sink_of(self, token_ids: list[int]) -> int:
        """How many first tokens the map's sink table has for this prompt, of those asked for."""
        entry = self.kvmap.sink_for(token_ids)
        return min(len(entry.token_ids) if entry else 0, FIRST_TOKENS)

    def expect(
        self,
        token_ids: list[int],
        steps: int,
        *,
        end: int,
        read: list[int] | None = None,
        spliced: int = 0,
    ) -> Stream:
        """What the hf lane answers when tokens up to ``end`` are not computed: ``spliced`` from
        the target's own cache, then the sink table, then mapped from a source that has read
        ``read``.
        """
        count, sink = len(token_ids), max(self.sink_of(token_ids), spliced)
        plan = HandoffPlan(
            count, range(spliced), range(spliced, sink), range(sink, end), range(end, count)
        )
        bridge = KvBridge(self.kvmap, source=self.source, target=self.target)
        own = prefill(self.target, token_ids[:spliced]).cache if spliced else None
        read_by_source = prefill(self.source, read or token_ids).cache
        handoff = bridge.hand_over(read_by_source, token_ids, plan, own)
        return self._stream(handoff.cache, handoff.logits, steps)

    def native(self, token_ids: list[int], steps: int) -> Stream:
        """What the target answers when it reads everything itself."""
        return self.go_on(None, token_ids, steps)

    def go_on(self, cache: HfCache | None, token_ids: list[int], steps: int) -> Stream:
        """The target reads the tokens that ``cache`` does not hold, and answers."""
        cache = fork(cache) if cache is not None else None
        held = num_entries(cache) if cache is not None else 0
        read = prefill(self.target, token_ids[held:], cache, logits_to_keep=1)
        return self._stream(read.cache, read.logits[-1], steps)

    def _stream(self, cache: HfCache, logits: torch.Tensor, steps: int) -> Stream:
        again = fork(cache)
        tokens = generate(self.target, cache, logits, steps)
        after = prefill(self.target, tokens, again).logits[:-1]
        return Stream(tokens, torch.cat([logits[None], after]), cache)


def make_world(folder: Path, blocks: Breakable) -> World:
    """Fit a small map in ``folder``."""
    source, target = (load_model(model_folder(name)) for name in ("tiny-s", "tiny-m"))
    rng = np.random.default_rng(0)
    documents = [source.tokenise(make_document(rng, 256, 16, 0).text) for _ in range(12)]
    moments = calibrate(
        source, target, documents, CalibrationConfig(), folder / "pair.moments.safetensors"
    )
    kvmap = fit(moments, FitConfig(scope="slice", n=4))
    path = folder / "pair.kvmap.safetensors"
    return World(source, target, kvmap, kvmap.save(path), path, blocks)
