"""Speculation from a handed-over cache: what comes out is what the verifier alone would say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import stacked, tokens
from handmade_maps import copy_map, random_map
from random_models import available_architectures
from speculate_cases import NEW, nearly, read_alone, require_caches_hold_what_was_committed
from streams import require_equal_streams

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.decode.speculation.speculate import speculate
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.spec.plan import plan_handoff


@pytest.mark.parametrize("architecture", available_architectures())
def test_greedy_is_what_the_verifier_decodes_from_the_same_mapped_cache(
    architecture: str, random_model: Callable
) -> None:
    verifier = random_model(architecture)
    draft = nearly(verifier)
    bridge = KvBridge(copy_map(draft, verifier), source=draft, target=verifier)
    ids = tokens(40)
    read = prefill(draft, ids)
    handoff = bridge.hand_over(read.cache, ids, plan_handoff(40, repair_window=8))
    before = stacked(read.cache).clone(), stacked(handoff.cache).clone()
    result = speculate(
        draft,
        verifier,
        read.cache,
        handoff.cache,
        handoff.logits,
        NEW,
        draft_length=DraftLength(confidence=0.01),  # random models are never surer
    )
    assert torch.equal(stacked(read.cache), before[0]), "the draft's cache was changed"
    assert torch.equal(stacked(handoff.cache), before[1]), "the verifier's cache was changed"

    alone = generate(verifier, fork(handoff.cache), handoff.logits, NEW)
    chosen_from, _ = read_alone(verifier, handoff.cache, handoff.logits, alone)
    require_equal_streams(result.rows[0], alone, chosen_from)
    assert len(set(alone)) > 3, "a stream of one token proves nothing"
    assert 0.1 < result.acceptance_rate < 1, "only one of two paths was taken"
    assert result.verifier_steps < NEW - 1
    (stream,) = result.rows
    require_caches_hold_what_was_committed(
        result,
        0,
        prefill(draft, [*ids.tolist(), *stream[:-1]]).cache,
        read_alone(verifier, handoff.cache, handoff.logits, stream)[1],
    )


def test_models_of_unequal_shape_that_agree_on_nothing(random_model: Callable) -> None:
    draft = random_model("llama", layers=3, kv_heads=4, seed=1)
    verifier = random_model("qwen3", head_dim=32)
    bridge = KvBridge(random_map(draft, verifier), source=draft, target=verifier)
    ids = tokens(40)
    read = prefill(draft, ids)
    handoff = bridge.hand_over(read.cache, ids, plan_handoff(40, repair_window=8))
    never_stop = DraftLength(confidence=0.0)
    result = speculate(
        draft, verifier, read.cache, handoff.cache, handoff.logits, 30, draft_length=never_stop
    )
    alone = generate(verifier, fork(handoff.cache), handoff.logits, 30)
    chosen_from, _ = read_alone(verifier, handoff.cache, handoff.logits, alone)
    require_equal_streams(result.rows[0], alone, chosen_from)
    assert result.acceptance_rate < 0.2
    assert result.proposed >= 4 * (result.row_steps - 3), "blocks shrink to 4, and no further"


@pytest.mark.parametrize(("length", "steps"), [(4, 8), (8, 5), (13, 3), (24, 2)])
def test_full_agreement_takes_whole_blocks(length: int, steps: int, random_model: Callable) -> None:
    """40 tokens after the first, length + 1 by each pass of the verifier."""
    loaded = random_model()
    read = prefill(loaded, tokens(40))
    fixed = DraftLength(length, length, confidence=0.0)
    result = speculate(
        loaded, loaded, read.cache, read.cache, read.logits[-1], 41, draft_length=fixed
    )
    assert (result.verifier_steps, result.row_steps) == (steps, steps)
    assert (result.acceptance_rate, result.proposed) == (1.0, 40 - steps)
    assert result.acceptance_length == result.tokens_per_verifier_step == 40 / steps


def test_blocks_grow_with_agreement(random_model: Callable) -> None:
    """4, 8, 16, 24 and again 24 proposals and their bonus tokens: 81 tokens in five passes."""
    loaded = random_model()
    read = prefill(loaded, tokens(40))
    policy = DraftLength(confidence=0.0)
    result = speculate(
        loaded, loaded, read.cache, read.cache, read.logits[-1], 82, draft_length=policy
    )
    assert (result.verifier_steps, result.proposed) == (5, 76)


def test_an_unsure_draft_stops(random_model: Callable) -> None:
    """A block ends where the product of its probabilities falls too low, counted by hand."""
    loaded = random_model()
    read = prefill(loaded, tokens(40))
    stream = generate(loaded, fork(read.cache), read.logits[-1], NEW)
    chosen_from, _ = read_alone(loaded, read.cache, read.logits[-1], stream)
    best = chosen_from.softmax(-1).amax(-1)
    wanted = float(best[1:].median()) ** 2
    policy = DraftLength(24, 24, confidence=wanted)
    result = speculate(
        loaded, loaded, read.cache, read.cache, read.logits[-1], NEW, draft_length=policy
    )
    proposed = steps = 0
    place = 1
    while place < NEW:  # each step: proposals while they stand a chance, then one of the verifier's
        block = 0
        while block < min(24, NEW - place - 1) and best[place : place + block + 1].prod() >= wanted:
            block += 1
        proposed, steps, place = proposed + block, steps + 1, place + block + 1
    assert steps < proposed < 4 * steps, "blocks of one length prove nothing"
    assert (result.proposed, result.verifier_steps) == (proposed, steps)
    assert result.rows == [stream]


def test_an_end_token_inside_an_accepted_block_ends_the_row(random_model: Callable) -> None:
    """The draft is the verifier, so the whole block would be accepted; the end token cuts it."""
    loaded = random_model()
    ids = tokens(40)
    read = prefill(loaded, ids)
    free = generate(loaded, fork(read.cache), read.logits[-1], 30)
    end = free.index(free[6])
    fixed = DraftLength(24, 24, confidence=0.0)
    result = speculate(
        loaded,
        loaded,
        read.cache,
        read.cache,
        read.logits[-1],
        30,
        eos_token_ids={free[6]},
        draft_length=fixed,
    )
    assert result.rows == [free[: end + 1]]
    assert (result.verifier_steps, result.accepted) == (1, end)
    own = prefill(loaded, [*ids.tolist(), *free[:end]]).cache
    require_caches_hold_what_was_committed(result, 0, own, own)


def test_one_token_needs_no_draft(random_model: Callable) -> None:
    loaded = random_model()
    read = prefill(loaded, tokens(40))
    result = speculate(loaded, loaded, read.cache, read.cache, read.logits[-1], 1)
    assert result.rows == [[int(read.logits[-1].argmax())]]
    assert (result.verifier_steps, result.proposed, result.acceptance_rate) == (0, 0, 0.0)
    assert torch.equal(stacked(result.draft_cache), stacked(read.cache))


def test_generation_goes_on_from_both_caches(random_model: Callable) -> None:
    """Speculate, then let the verifier alone, then speculate again: one stream."""
    verifier = random_model()
    draft = nearly(verifier)
    ids = tokens(40)
    read, own = prefill(draft, ids), prefill(verifier, ids)
    whole = generate(verifier, fork(own.cache), own.logits[-1], 60)
    chosen_from, _ = read_alone(verifier, own.cache, own.logits[-1], whole)
    first = speculate(draft, verifier, read.cache, own.cache, own.logits[-1], 20)
    stream = list(first.rows[0])
    step = prefill(verifier, stream[-1:], first.verifier_cache)
    drafted = prefill(draft, stream[-1:], first.draft_cache)
    second = speculate(draft, verifier, drafted.cache, step.cache, step.logits[-1], 20)
    stream += second.rows[0]
    step = prefill(verifier, stream[-1:], second.verifier_cache)
    stream += generate(verifier, step.cache, step.logits[-1], 20)
    require_equal_streams(stream, whole, chosen_from)
