"""Speculation over a change of RoPE's frequencies, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import stacked, tokens
from changing_rope import LENGTH_DEPENDENT
from streams import require_equal_streams

from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.decode.speculation.speculate import speculate
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.inject.hf_cache import fork, written_lengths


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_frequencies_change_where_plain_decoding_changes_them(
    options: dict, random_model: Callable
) -> None:
    """20 tokens of prompt and 40 new ones, over a change at 32."""
    verifier = random_model("llama", **options)
    ids = tokens(20)
    own = prefill(verifier, ids)
    alone = generate(verifier, fork(own.cache), own.logits[-1], 40)
    expected = fork(own.cache)
    chosen_from = [own.logits[-1]]
    prefill(verifier, ids)  # a short sequence: dynamic RoPE forgets the long one
    for token in alone[:-1]:
        chosen_from.append(prefill(verifier, [token], expected).logits[0])
    prefill(verifier, ids)
    result = speculate(
        verifier,
        verifier,
        own.cache,
        own.cache,
        own.logits[-1],
        40,
        draft_length=DraftLength(confidence=0.0),
    )
    require_equal_streams(result.rows[0], alone, torch.stack(chosen_from))
    torch.testing.assert_close(stacked(result.verifier_cache), stacked(expected), rtol=0, atol=5e-5)
    assert result.accepted > 0
    lengths = written_lengths(result.verifier_cache, range(59))
    assert lengths is not None
    assert {verifier.spec.rope.regime(n) for n in lengths} == {
        verifier.spec.rope.regime(n) for n in written_lengths(expected, range(59))
    }


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_a_batch_whose_frequencies_would_change_is_refused(
    options: dict, random_model: Callable
) -> None:
    verifier, plain = random_model("llama", **options), random_model("llama")
    own, read = (prefill(loaded, tokens(2, 20)) for loaded in (verifier, plain))
    logits = own.logits[:, -1]
    with pytest.raises(MismatchError, match="Speculate on its rows one by one"):
        speculate(plain, verifier, read.cache, own.cache, logits, 13)
    with pytest.raises(MismatchError, match="Speculate on its rows one by one"):
        speculate(verifier, plain, own.cache, read.cache, logits, 13)
    short = speculate(plain, verifier, read.cache, own.cache, logits, 11)
    assert [len(row) for row in short.rows] == [11, 11]


def test_mistakes_are_refused_before_anything_runs(
    random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, small = random_model(), random_model(max_positions=64)
    read, less = prefill(loaded, tokens(20)), prefill(small, tokens(19))
    logits = read.logits[-1]
    same = prefill(small, tokens(20)).cache

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model ran")

    for model in (loaded, small):
        monkeypatch.setattr(model.model, "forward", never)
    with pytest.raises(InputError, match=r"1 sequences of 19 tokens, .* 1 of 20"):
        speculate(small, loaded, less.cache, read.cache, logits, 5)
    with pytest.raises(InputError, match="with logits for 2"):
        speculate(loaded, loaded, read.cache, read.cache, logits.expand(2, -1), 5)
    with pytest.raises(InputError, match=r"takes 70 positions; .* allows 64"):
        speculate(small, loaded, same, read.cache, logits, 50)
    with pytest.raises(InputError, match=r"takes 70 positions; .* allows 64"):
        speculate(loaded, small, read.cache, same, logits, 50)
    with pytest.raises(InputError, match="at least 1, got 0"):
        speculate(loaded, loaded, read.cache, read.cache, logits, 0)
    with pytest.raises(InputError, match="temperature must be 0"):
        speculate(loaded, loaded, read.cache, read.cache, logits, 5, temperature=-1.0)
    with pytest.raises(InputError, match=r"mask needs the shape \[1, 20\]"):
        speculate(
            loaded, loaded, read.cache, read.cache, logits, 5, attention_mask=torch.ones(1, 21)
        )
