"""Sampled speculation: the verifier's distribution, whatever the draft proposes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from caches import tokens
from goodness import require_distribution
from speculate_cases import nearly

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.sampling import distribution
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.decode.speculation.speculate import speculate
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.models import LoadedModel


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_samples_have_the_verifiers_distribution(
    temperature: float, random_model: Callable
) -> None:
    """2,000 rows of one prompt. The first token, and the second whatever the first was, against the
    verifier's own probabilities by a chi-square; the draft is another model altogether.
    """
    verifier, draft = random_model(seed=0), random_model(seed=1)
    ids, draws = tokens(12), 2000
    own, read = prefill(verifier, ids), prefill(draft, ids)
    chances = distribution(own.logits[-1], temperature)
    every = torch.arange(verifier.spec.vocab_size)
    after = prefill(
        verifier, torch.cat([ids.expand(len(every), -1), every[:, None]], dim=-1), logits_to_keep=1
    ).logits[:, -1]
    second = chances @ distribution(after, temperature)

    many_own, many_read = (
        prefill(loaded, ids.expand(draws, -1), logits_to_keep=1) for loaded in (verifier, draft)
    )
    result = speculate(
        draft,
        verifier,
        many_read.cache,
        many_own.cache,
        many_own.logits[:, -1],
        3,
        temperature=temperature,
        generator=torch.Generator().manual_seed(5),
    )
    drawn = torch.tensor(result.rows)
    for place, expected in ((0, chances), (1, second)):
        counts = drawn[:, place].bincount(minlength=len(every))
        require_distribution(counts.tolist(), expected.tolist())
    q = distribution(read.logits[-1], temperature)
    assert (q - chances).abs().sum() > 0.2, "the two models must differ"
    assert 0.02 < result.acceptance_rate < 0.98
    assert result.proposed == draws, "a draft that samples does not stop unsure"


def test_a_long_sampled_answer_is_drawn_from_the_verifier(random_model: Callable) -> None:
    """Later tokens, whatever came before: each token's rank in the verifier's own cumulative
    distribution is uniform.
    """
    verifier = random_model()
    draft = nearly(verifier, 0.3)
    ids, draws, length = tokens(12), 60, 40
    own, read = (prefill(loaded, ids.expand(draws, -1)) for loaded in (verifier, draft))
    result = speculate(
        draft,
        verifier,
        read.cache,
        own.cache,
        own.logits[:, -1],
        length,
        temperature=1.0,
        generator=torch.Generator().manual_seed(6),
    )
    drawn = torch.tensor(result.rows)
    seen = prefill(verifier, drawn[:, :-1], fork(own.cache)).logits
    chances = distribution(torch.cat([own.logits[:, -1:], seen], dim=1), 1.0).double()
    upper = chances.cumsum(-1).gather(2, drawn[..., None])[..., 0]
    width = chances.gather(2, drawn[..., None])[..., 0]
    noise = torch.rand(upper.shape, generator=torch.Generator().manual_seed(8)).double()
    bins = ((upper - noise * width).clamp(0, 1 - 1e-9) * 20).long()
    require_distribution(bins.flatten().bincount(minlength=20).tolist(), [1 / 20] * 20)
    assert 0.2 < result.acceptance_rate < 0.95
    assert result.acceptance_length > 1.2


def test_equal_seeds_give_equal_samples(random_model: Callable) -> None:
    verifier = random_model()
    read = prefill(verifier, tokens(20))
    streams = [
        speculate(
            nearly(verifier),
            verifier,
            read.cache,
            read.cache,
            read.logits[-1],
            20,
            temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
        ).rows
        for seed in (1, 1, 2)
    ]
    assert streams[0] == streams[1] != streams[2]


def test_a_draft_with_padding_ids_proposes_none_of_them(random_model: Callable) -> None:
    """Models of one tokenizer may have vocabularies padded to different sizes."""
    verifier = random_model()
    model = copy.deepcopy(verifier.model)
    size = verifier.spec.vocab_size
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[size:] = 3 * model.lm_head.weight[:8]
    padded = LoadedModel("padded", model, verifier.tokenizer, verifier.spec)
    ids = tokens(40)
    read, own = prefill(padded, ids), prefill(verifier, ids)
    assert (prefill(padded, tokens(200)).logits.argmax(-1) >= size).any(), "they must tempt it"
    for temperature in (0.0, 0.7):
        result = speculate(
            padded,
            verifier,
            read.cache,
            own.cache,
            own.logits[-1],
            40,
            temperature=temperature,
            generator=torch.Generator().manual_seed(0),
            draft_length=DraftLength(confidence=0.0),
        )
        assert result.acceptance_rate == 1.0, "without padding ids the two are one model"
