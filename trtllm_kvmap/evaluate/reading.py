"""Reads each context once with the source and once with the target; every arm starts from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

import numpy as np

from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.probe import Answers, Ready, Script, ask
from trtllm_kvmap.evaluate.score import Score, attention_cosines, score
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.models import LoadedModel


@dataclass(frozen=True, slots=True)
class Stranger:
    """Another document, cut to the length of this one, in the source's cache."""

    token_ids: tuple[int, ...]
    source: Ready


@dataclass(frozen=True, slots=True)
class Reading:
    """One item read natively: by ``source`` and ``target``, the ``script`` of what is asked, and
    the target's own ``answers``. ``stranger`` is None where no other document is given.
    """

    item: Item
    source: Ready
    target: Ready
    script: Script
    answers: Answers
    stranger: Stranger | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm on one item; ``cosines`` [layers] is empty for an arm that runs the source."""

    score: Score
    cosines: np.ndarray
    mapped_tokens: int


def read_item(
    source: LoadedModel,
    target: LoadedModel,
    item: Item,
    others: Sequence[Item],
    *,
    rollout_steps: int,
) -> Reading:
    """Run both models over the context of ``item``, and the source over the contexts of ``others``
    one after another until they are as long. Raises InputError for a context that a model cannot
    take.
    """
    longest = len(item.context) + max(item.longest_path, rollout_steps)
    limit = min(source.spec.max_positions, target.spec.max_positions)
    if longest > limit:
        raise InputError(
            f"A context of {len(item.context)} tokens with what is asked after it takes {longest} "
            f"positions; {source.name} and {target.name} both allow {limit}. Give shorter contexts."
        )
    native = read_context(target, item.context)
    rollout = generate(target, fork(native.cache), native.logits, rollout_steps)
    script = Script(item, rollout)
    others = [other for other in others if other.context != item.context]
    stranger = None
    if others:
        endless = cycle(chain.from_iterable(other.context for other in others))
        token_ids = tuple(islice(endless, len(item.context)))
        stranger = Stranger(token_ids, read_context(source, token_ids))
    return Reading(
        item=item,
        source=read_context(source, item.context),
        target=native,
        script=script,
        answers=ask(native, script.tree),
        stranger=stranger,
    )


def read_context(model: LoadedModel, token_ids: Sequence[int]) -> Ready:
    """A model that has read ``token_ids`` in one pass."""
    read = prefill(model, token_ids, logits_to_keep=1)
    return Ready(model, read.cache, read.logits[-1], len(token_ids))


def judge(ready: Ready, reading: Reading, *, length_normalised: bool) -> Outcome:
    """Ask ``ready`` what the target was asked, and compare."""
    answers = ask(ready, reading.script.tree)
    same_model = ready.model is reading.target.model
    return Outcome(
        score=score(reading.script, answers, reading.answers, length_normalised=length_normalised),
        cosines=attention_cosines(answers, reading.answers) if same_model else np.empty(0),
        mapped_tokens=len(ready.mapped),
    )
