"""Greedy decoding from a cache: against transformers' own, with end tokens, holes and pads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import tokens
from random_models import available_architectures
from streams import require_equal_streams

from trtllm_kvmap.decode.generate import NearTie, generate, generate_batch, near_ties, stream_tokens
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import fork, num_entries, view_pool


@pytest.mark.parametrize("architecture", available_architectures())
def test_generation_is_transformers_own(architecture: str, random_model: Callable) -> None:
    loaded = random_model(architecture)
    ids = tokens(20)
    read = prefill(loaded, ids)
    mine = generate(loaded, read.cache, read.logits[-1], 40)
    native = loaded.model.generate(ids[None], max_new_tokens=40, do_sample=False)[0, 20:].tolist()
    seen = prefill(loaded, torch.cat([ids, torch.tensor(native)])).logits
    require_equal_streams(mine, native, seen[19:-1])
    assert num_entries(read.cache) == 20 + 39, "the last token is chosen, not read"


def test_generation_stops_at_an_end_token(random_model: Callable) -> None:
    loaded = random_model()
    read = prefill(loaded, tokens(20))
    free = generate(loaded, fork(read.cache), read.logits[-1], 30)
    end = free[12]
    cut = generate(loaded, fork(read.cache), read.logits[-1], 30, eos_token_ids=[end])
    assert cut == free[: free.index(end) + 1]
    assert len(generate(loaded, read.cache, read.logits[-1], 1)) == 1


def test_a_stream_is_generate_and_reads_no_further_than_it_is_asked(random_model: Callable) -> None:
    loaded = random_model()
    read = prefill(loaded, tokens(20))
    whole, logits = generate(loaded, fork(read.cache), read.logits[-1], 30), read.logits[-1]
    assert list(stream_tokens(loaded, fork(read.cache), logits, 30)) == whole
    end = whole[12]
    cut = list(stream_tokens(loaded, fork(read.cache), logits, 30, eos_token_ids=[end]))
    assert cut == whole[: whole.index(end) + 1]
    stream = stream_tokens(loaded, read.cache, logits, 30)
    assert [next(stream) for _ in range(5)] == whole[:5]
    assert num_entries(read.cache) == 24, "the fifth token is chosen, not read"
    with pytest.raises(InputError, match="allows"):
        next(stream_tokens(loaded, read.cache, logits, 10_000))


def test_a_batch_generates_each_row_as_if_alone(random_model: Callable) -> None:
    loaded = random_model()
    ids = tokens(3, 20)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :7], mask[2, :19] = 0, 0
    read = prefill(loaded, ids, attention_mask=mask)
    alone, ends = [], []
    for row, kept in zip(ids, mask, strict=True):
        own = prefill(loaded, row[kept.bool()])
        alone.append(generate(loaded, own.cache, own.logits[-1], 25))
        ends.append(alone[-1][5 * len(alone)])
    free = generate_batch(loaded, fork(read.cache), read.logits[:, -1], 25, attention_mask=mask)
    for row, stream in enumerate(alone):
        own = prefill(loaded, torch.cat([ids[row][mask[row].bool()], torch.tensor(stream)]))
        require_equal_streams(free[row], stream, own.logits[-26:-1], margin=1e-3)
    cut = generate_batch(
        loaded,
        read.cache,
        read.logits[:, -1],
        25,
        attention_mask=mask,
        eos_token_ids=set(ends),
    )
    for row, stream in enumerate(free):
        stop = next((i for i, token in enumerate(stream) if token in set(ends)), 24)
        assert cut[row] == stream[: stop + 1]
    assert len({len(row) for row in cut}) > 1


def test_positions_may_run_ahead_of_the_entries(random_model: Callable) -> None:
    """After a hole: 3 first and 6 last tokens of 30, then new tokens from position 30 on."""
    loaded = random_model()
    ids = tokens(30)
    head = prefill(loaded, ids[:3]).cache
    read = prefill(loaded, ids[-6:], head, positions=torch.arange(24, 30))
    start = fork(read.cache)
    mine = generate(loaded, read.cache, read.logits[-1], 8, position=30)
    again = prefill(loaded, mine, start, positions=torch.arange(30, 38))
    assert again.logits[:-1].argmax(-1).tolist() == mine[1:]
    for here, there in zip(view_pool(read.cache).keys, view_pool(start).keys, strict=True):
        torch.testing.assert_close(here, there[:, :, :-1], rtol=0, atol=2e-5)


def test_outgrowing_the_model_is_refused_before_it_starts(random_model: Callable) -> None:
    loaded = random_model()
    read = prefill(loaded, tokens(20))
    with pytest.raises(InputError, match=r"takes 513 positions; .* allows 512"):
        generate(loaded, read.cache, read.logits[-1], 493)
    with pytest.raises(InputError, match="at least 1, got 0"):
        generate(loaded, read.cache, read.logits[-1], 0)
    assert num_entries(read.cache) == 20


def test_near_ties_are_named() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.999], [5.0, 0.0, 4.0], [0.5, 0.25, 0.5]])
    ties = near_ties(logits, 0.01)
    assert [tie.step for tie in ties] == [0, 2]
    assert ties[0] == NearTie(0, (1, 2), pytest.approx(0.001, abs=1e-6))
    assert set(ties[1].token_ids) == {0, 2}
    assert ties[1].distance == 0.0
    assert near_ties(logits, 0.0) == []
