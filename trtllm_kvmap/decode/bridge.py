"""The bridge between two models: a source's cache in, the target's cache out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.admission import check_request
from trtllm_kvmap.decode.columns import mapped_span, place_own
from trtllm_kvmap.decode.first import add_first
from trtllm_kvmap.decode.prompt import Prompt, TokenIds
from trtllm_kvmap.decode.repair import repair
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import (
    HfCache,
    Pass,
    empty_cache,
    fork,
    make_cache,
    num_entries,
    record_pass,
    view_pool,
    written_lengths,
)
from trtllm_kvmap.mapper.backends import make_mapper
from trtllm_kvmap.models import KnownModel, LoadedModel, require_same_tokens
from trtllm_kvmap.spec.plan import HandoffPlan


@dataclass(frozen=True, slots=True)
class Handoff:
    """A target that is ready to decode.

    ``cache`` holds the whole prompt; ``logits`` are those after its last token, float32
    [vocab_size], or [batch, vocab_size] for a batch. ``sink_tokens`` of ``plan.first`` came from
    the map's sink table, the rest were computed (0: the table had no such prefix). ``seconds`` is
    the wall time of the steps splice, first, map and repair. ``repaired_logits`` [kept, vocab_size]
    or [batch, kept, vocab_size] are those after the last repaired tokens, ``logits`` their last
    row: the losses of the prompt tokens that they predict are known for nothing.
    """

    cache: HfCache
    logits: torch.Tensor
    plan: HandoffPlan
    sink_tokens: int
    seconds: dict[str, float]
    repaired_logits: torch.Tensor


class KvBridge:
    """Hands prompts that ``source`` has read over to ``target``.

    ``source`` may be a RemoteModel, whose caches come from another process. Raises MismatchError
    unless the map was fitted for these two models (configuration, weights and tokenizer) and both
    read the same token ids.
    """

    def __init__(
        self, kvmap: KvMap, *, source: KnownModel, target: LoadedModel, backend: str = "cpu"
    ) -> None:
        require_same_tokens(source, target)
        kvmap.require_models(source.fingerprint, target.fingerprint)
        self.kvmap, self.source, self.target = kvmap, source, target
        self.mapper = make_mapper(kvmap, backend)

    def convert(
        self,
        cache: HfCache,
        token_ids: TokenIds,
        *,
        first_tokens: int = 1,
        attention_mask: torch.Tensor | None = None,
    ) -> HfCache:
        """The target's cache for the same tokens: the first ``first_tokens`` are the target's own,
        the rest is mapped. ``cache`` is the source's, and is not changed.

        Shapes and errors as for hand_over. To decode, the target needs the logits of the last
        token, which no map gives: use hand_over.
        """
        prompt = Prompt.of(token_ids, attention_mask, device=self.target.device)
        end = prompt.num_tokens
        first_end = min(max(first_tokens, 0), end)
        plan = HandoffPlan(end, range(0), range(first_end), range(first_end, end), range(end, end))
        length = check_request(self.kvmap, self.source, self.target, prompt, plan, cache, None)
        return self._fill(prompt, plan, cache, None, length, stopwatch())[0]

    def hand_over(
        self,
        source_cache: HfCache,
        token_ids: TokenIds,
        plan: HandoffPlan,
        target_cache: HfCache | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        keep_logits: int = 1,
    ) -> Handoff:
        """Carry out ``plan`` (spec.plan.plan_handoff) for the prompt ``token_ids`` [num_tokens].

        ``source_cache`` holds at least the tokens up to the end of ``plan.mapped``, in order from
        position 0; ``target_cache`` at least those of ``plan.spliced``, exact. Neither is changed.

        A batch [batch, num_tokens] is left-padded: ``attention_mask`` [batch, num_tokens] has 0 for
        a pad, and the source's cache holds the same columns. The plan speaks of the columns; a
        shorter row has its own first tokens and shares the repaired columns, as a plan of its own
        would have it. Nothing can be spliced into a padded batch, and no token selected.

        ``keep_logits``: how many rows of repaired_logits to keep; each has the size of the
        vocabulary.

        Raises InputError before anything runs: token ids a model does not know, a prompt longer
        than a model's limit, caches shorter than the plan needs, a plan for another length.
        MismatchError: a cache of another model, or source keys written across a change of RoPE
        frequencies.
        """
        prompt = Prompt.of(token_ids, attention_mask, device=self.target.device)
        if not plan.repaired:
            raise InputError(
                "The plan leaves no token to the target, which must compute at least the last one "
                "to go on; make the plan with plan_handoff, or use convert for a cache alone."
            )
        length = check_request(
            self.kvmap, self.source, self.target, prompt, plan, source_cache, target_cache
        )
        seconds = stopwatch()
        cache, sink_tokens = self._fill(prompt, plan, source_cache, target_cache, length, seconds)
        return complete(self.target, prompt, plan, cache, sink_tokens, seconds, keep_logits)

    def _fill(
        self,
        prompt: Prompt,
        plan: HandoffPlan,
        source_cache: HfCache,
        target_cache: HfCache | None,
        source_length: int,
        seconds: dict[str, float],
    ) -> tuple[HfCache, int]:
        """The target's cache of everything before ``plan.repaired``, and the sink tokens taken."""
        with timed(seconds, "first"):
            spliced = empty_cache() if target_cache is None else target_cache
            own = fork(spliced, plan.spliced.stop) if plan.spliced else empty_cache()
            own, sink_tokens = add_first(self.kvmap, self.target, prompt, plan, own)
        if not plan.mapped and (not prompt.padded or not plan.first):
            return own, sink_tokens
        cache = make_cache(
            self.target.spec,
            plan.mapped.stop,
            batch=prompt.batch,
            dtype=self.target.model.dtype,
            device=self.target.device,
        )
        with timed(seconds, "splice"):
            place_own(own, cache, prompt.pads)
        length = self.target.rope_length(prompt.longest)
        if plan.mapped:
            with timed(seconds, "map"):
                span = mapped_span(
                    prompt,
                    plan,
                    source_entries=num_entries(source_cache),
                    source_length=source_length,
                    target_length=length,
                )
                self.mapper.map_kv(view_pool(source_cache), view_pool(cache), span)
        own_end = plan.mapped.stop if prompt.padded else plan.first.stop
        for known in written_lengths(own, range(plan.first.stop)) or ():
            record_pass(cache, Pass(0, own_end, known))
        record_pass(cache, Pass(0 if prompt.padded else own_end, plan.mapped.stop, length))
        return cache, sink_tokens


def complete(
    target: LoadedModel,
    prompt: Prompt,
    plan: HandoffPlan,
    cache: HfCache,
    sink_tokens: int,
    seconds: dict[str, float],
    keep_logits: int,
) -> Handoff:
    """The last step of a hand-over: repair on top of ``cache``, which holds everything before
    ``plan.repaired`` and is extended in place.
    """
    with timed(seconds, "repair"):
        kept = repair(target, prompt, plan, cache, keep=max(keep_logits, 1))
        kept = kept[0] if prompt.single else kept
    return Handoff(cache, kept[..., -1, :], plan, sink_tokens, seconds, kept)


def stopwatch() -> dict[str, float]:
    """The steps of a hand-over, none of which has taken any time yet."""
    return dict.fromkeys(("splice", "first", "map", "repair"), 0.0)


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Adds the wall time of the block to ``step``."""
    began = time.perf_counter()
    yield
    seconds[step] += time.perf_counter() - began
