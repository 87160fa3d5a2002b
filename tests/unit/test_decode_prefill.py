"""Running a model on top of a cache: chunks, holes, pads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import tokens
from random_models import available_architectures

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import fork, num_entries, view_pool, written_lengths
from trtllm_kvmap.tiny.documents import VOCABULARY

DYNAMIC = ({"rope_type": "dynamic", "factor": 2.0}, 32)
LONGROPE = (
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    },
    64,
)
LENGTH_DEPENDENT = [pytest.param(*DYNAMIC, id="dynamic"), pytest.param(*LONGROPE, id="longrope")]

OUTSIDE = len(VOCABULARY)  # the first token id that no model here knows


@pytest.mark.parametrize("architecture", available_architectures())
def test_logits_are_the_models_own(architecture: str, random_model: Callable) -> None:
    loaded = random_model(architecture)
    ids = tokens(20)
    with torch.no_grad():
        native = loaded.model(ids[None]).logits
    assert torch.equal(prefill(loaded, ids).logits, native[0])
    assert torch.equal(prefill(loaded, ids[None]).logits, native)
    assert torch.equal(prefill(loaded, ids.tolist()).logits, native[0])
    last = prefill(loaded, ids, logits_to_keep=3).logits
    torch.testing.assert_close(last, native[0, -3:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", available_architectures())
def test_chunks_give_what_one_pass_gives(architecture: str, random_model: Callable) -> None:
    loaded = random_model(architecture)
    ids = tokens(23)
    whole = prefill(loaded, ids)
    cache, logits = None, []
    for chunk in ids.split([7, 1, 15]):
        step = prefill(loaded, chunk, cache)
        cache = step.cache
        logits.append(step.logits)
    torch.testing.assert_close(torch.cat(logits), whole.logits, rtol=0, atol=2e-5)
    assert num_entries(cache) == 23


@pytest.mark.parametrize("architecture", available_architectures())
def test_tokens_in_a_hole_do_not_exist(architecture: str, random_model: Callable) -> None:
    """The first 3 and the last 6 of 30 tokens, at their true positions, equal a run over all 30 in
    which the last 6 may not look at the ones between.
    """
    loaded = random_model(architecture)
    ids, first, last = tokens(30), 3, 6
    cache = prefill(loaded, ids[:first]).cache
    with_hole = prefill(loaded, ids[-last:], cache, positions=torch.arange(24, 30))
    allowed = torch.ones(30, 30).tril()
    allowed[-last:, first:-last] = 0
    mask = torch.zeros(1, 1, 30, 30).masked_fill(allowed == 0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = loaded.model(ids[None], attention_mask=mask).logits[0, -last:]
    torch.testing.assert_close(with_hole.logits, expected, rtol=0, atol=2e-5)
    assert num_entries(with_hole.cache) == first + last


def test_a_padded_batch_reads_each_row_as_if_alone(random_model: Callable) -> None:
    loaded = random_model()
    lengths, columns = (11, 4, 1), 11
    rows = [tokens(length, seed=length) for length in lengths]
    ids, mask = torch.zeros(3, columns, dtype=torch.long), torch.zeros(3, columns)
    for row, own in enumerate(rows):
        ids[row, columns - len(own) :] = own
        mask[row, columns - len(own) :] = 1
    batch = prefill(loaded, ids[:, :6], attention_mask=mask[:, :6])
    batch = prefill(loaded, ids[:, 6:], batch.cache, attention_mask=mask)
    for row, own in enumerate(rows):
        alone = prefill(loaded, own)
        kept = min(len(own), 5)
        torch.testing.assert_close(
            batch.logits[row, -kept:], alone.logits[-kept:], rtol=0, atol=2e-5
        )
        for here, there in zip(
            view_pool(batch.cache).keys, view_pool(alone.cache).keys, strict=True
        ):
            torch.testing.assert_close(
                here[row, :, columns - len(own) :], there[0], rtol=0, atol=2e-5
            )


def test_the_cache_is_extended_in_place_and_a_fork_is_not(random_model: Callable) -> None:
    loaded = random_model()
    cache = prefill(loaded, tokens(5)).cache
    other = fork(cache)
    assert prefill(loaded, tokens(2), cache).cache is cache
    assert (num_entries(cache), num_entries(other)) == (7, 5)


@pytest.mark.parametrize(("rope", "max_positions"), LENGTH_DEPENDENT)
def test_the_head_of_a_long_sequence_is_rotated_for_all_of_it(
    rope: dict, max_positions: int, random_model: Callable
) -> None:
    """The first 4 of 60 tokens must be those of one pass over all 60."""
    loaded = random_model("llama", max_positions=max_positions, rope=rope)
    ids = tokens(60)
    whole = prefill(loaded, ids)
    prefill(loaded, ids[:4])  # makes dynamic RoPE forget the long sequence
    head = prefill(loaded, ids[:4], sequence_length=60)
    short = prefill(loaded, ids[:4])
    torch.testing.assert_close(head.logits, whole.logits[:4], rtol=0, atol=2e-5)
    assert num_entries(head.cache) == 4
    differs = False
    for here, there, other in zip(
        view_pool(head.cache).keys,
        view_pool(whole.cache).keys,
        view_pool(short.cache).keys,
        strict=True,
    ):
        torch.testing.assert_close(here, there[:, :, :4], rtol=0, atol=2e-5)
        differs |= not torch.allclose(here, other, atol=1e-3)
    assert differs
    assert written_lengths(head.cache, range(4)) == [60]
    assert written_lengths(whole.cache, range(60)) == [60]


@pytest.mark.parametrize(("rope", "max_positions"), LENGTH_DEPENDENT)
def test_the_cache_remembers_how_long_the_sequence_was(
    rope: dict, max_positions: int, random_model: Callable
) -> None:
    loaded = random_model("llama", max_positions=max_positions, rope=rope)
    cache = prefill(loaded, tokens(20)).cache
    prefill(loaded, tokens(30, seed=1), cache)
    lengths = written_lengths(cache, range(50))
    assert [loaded.spec.rope.regime(length) for length in lengths] == [
        loaded.spec.rope.regime(20),
        loaded.spec.rope.regime(50),
    ]
    assert loaded.spec.rope.regime(20) != loaded.spec.rope.regime(50)


def test_dynamic_rope_remembers_the_longest_sequence(random_model: Callable) -> None:
    """transformers keeps the frequencies of a longer sequence until one shorter than the original
    length comes by; the record must say what was used.
    """
    rope, max_positions = DYNAMIC
    loaded = random_model("llama", max_positions=max_positions, rope=rope)
    prefill(loaded, tokens(60))
    after_long = prefill(loaded, tokens(40)).cache
    assert written_lengths(after_long, range(40)) == [60]
    assert loaded.rope_length(20) == 20
    prefill(loaded, tokens(20))
    after_short = prefill(loaded, tokens(40)).cache
    assert written_lengths(after_short, range(40)) == [40]
    for there, here in zip(view_pool(after_long).keys, view_pool(after_short).keys, strict=True):
        assert not torch.allclose(here, there, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": []}, "at least one token"),
        ({"token_ids": torch.zeros(2, 2, 2, dtype=torch.long)}, "need the shape"),
        ({"token_ids": torch.zeros(3)}, "must be integers, got torch.float32"),
        ({"token_ids": [3, -1]}, f"from -1 to 3; .* knows 0 to {OUTSIDE - 1}"),
        ({"token_ids": [3, OUTSIDE]}, f"from 3 to {OUTSIDE}; .* knows 0 to {OUTSIDE - 1}"),
        ({"token_ids": [3] * 509}, "takes 513 positions; .* allows 512"),
        ({"token_ids": [3, 4], "positions": torch.tensor([5, 512])}, "takes 513 positions"),
        ({"token_ids": [3, 4], "positions": torch.tensor([5, -1])}, "must not be negative"),
        ({"token_ids": [3, 4], "positions": torch.arange(3)}, "got \\[3\\]"),
        ({"token_ids": [3, 4], "attention_mask": torch.ones(1, 4)}, "\\[1, 6\\] is needed"),
        ({"token_ids": [3, 4], "sequence_length": 513}, "takes 513 positions"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(
    arguments: dict, message: str, random_model: Callable
) -> None:
    loaded = random_model()
    cache = prefill(loaded, tokens(4)).cache
    before = [view.clone() for view in view_pool(cache).keys]
    with pytest.raises(InputError, match=message):
        prefill(loaded, cache=cache, **arguments)
    assert num_entries(cache) == 4
    for here, there in zip(view_pool(cache).keys, before, strict=True):
        assert torch.equal(here, there)
