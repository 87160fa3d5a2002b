"""The source's half: it reads prompts and gives its keys and values away."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.prefill import prefill, token_losses
from trtllm_kvmap.decode.session.prefix import common_prefix
from trtllm_kvmap.exchange.offer import token_digest
from trtllm_kvmap.inject.hf_cache import (
    HfCache,
    empty_cache,
    fork,
    rope_length_of,
    view_pool,
)
from trtllm_kvmap.models import LoadedModel, RemoteModel

Owner = tuple[str, str]  # tenant, conversation


@dataclass(frozen=True, slots=True)
class SourceRead:
    """A prompt as the source holds it.

    ``kv`` [2, num_layers, num_kv_heads, num_tokens, head_dim], keys (rotated) then values;
    ``rope_length`` is the length whose frequencies the keys were written with; ``model`` says who
    wrote them; ``tokens_read`` of them were not held from an earlier turn; ``token_digest`` is that
    of the tokens in ``kv``, by exchange.offer. ``losses`` float64
    [judged - 1] are the source's own of the last tokens, where they were asked for: what a guard
    weighs the target's against.
    """

    kv: torch.Tensor
    rope_length: int
    model: RemoteModel
    tokens_read: int
    token_digest: str
    losses: torch.Tensor | None = None


class SourceReader:
    """Reads with one model, and keeps at most ``max_held_tokens`` tokens of conversations, those
    used last, so that the next turn of one reads only what is new.
    """

    def __init__(self, loaded: LoadedModel, max_held_tokens: int = 0) -> None:
        self.loaded, self.max_held_tokens = loaded, max_held_tokens
        self.model = RemoteModel(loaded.name, loaded.spec, loaded.fingerprint)
        self._held: OrderedDict[Owner, tuple[list[int], HfCache]] = OrderedDict()

    @property
    def held_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self._held.values())

    def held(self, token_ids: list[int], owner: Owner) -> int:
        """How many of ``token_ids`` a read for ``owner`` would find here already."""
        return common_prefix(self._held[owner][0], token_ids) if owner in self._held else 0

    def read(self, token_ids: list[int], owner: Owner = ("", ""), judged: int = 0) -> SourceRead:
        """The KV of ``token_ids``. ``owner``'s earlier read is extended where it begins alike;
        without a conversation nothing is kept. The last ``judged`` tokens are read in any case,
        for their losses.

        Raises InputError for tokens or lengths the model does not know, MismatchError when the keys
        were written with more than one set of RoPE frequencies.
        """
        held = min(self.held(token_ids, owner), len(token_ids) - judged)
        cache = fork(self._held[owner][1], held) if held else empty_cache()
        losses = None
        if held < len(token_ids):
            read = prefill(self.loaded, token_ids[held:], cache, logits_to_keep=max(judged, 1))
            cache = read.cache
            if judged:
                losses = token_losses(read.logits, torch.tensor(token_ids[-judged:]))
        length = rope_length_of(cache, self.loaded.spec.rope, len(token_ids))
        if owner[1]:
            self._keep(token_ids, cache, owner)
        pool = view_pool(cache)
        kv = torch.stack([torch.cat(pool.keys), torch.cat(pool.values)])
        tokens_read = len(token_ids) - held
        return SourceRead(kv, length, self.model, tokens_read, token_digest(token_ids), losses)

    def _keep(self, token_ids: list[int], cache: HfCache, owner: Owner) -> None:
        longer, _ = self._held.get(owner, ([], None))
        if longer[: len(token_ids)] != token_ids:  # else what is held says more
            self._held[owner] = list(token_ids), cache
        self._held.move_to_end(owner)
        while self.held_tokens > self.max_held_tokens:
            self._held.popitem(last=False)
