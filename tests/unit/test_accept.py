"""Which proposals a verifier takes: greedy against the definition, sampled by a chi-square test."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from goodness import require_distribution

from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.sampling import choose, distribution
from trtllm_kvmap.decode.speculation.accept import accept_greedy, accept_sampled
from trtllm_kvmap.errors import InputError


def test_greedy_takes_what_agrees_and_adds_one() -> None:
    best = [3, 1, 4, 1]
    logits = torch.zeros(4, 6)
    logits[range(4), best] = 1.0
    assert accept_greedy([3, 1, 4], logits) == [3, 1, 4, 1]
    assert accept_greedy([3, 1, 5], logits) == [3, 1, 4]
    assert accept_greedy([0, 1, 4], logits) == [3], "nothing after a mismatch counts"
    assert accept_greedy([], logits[:1]) == [3]


# Chains over four tokens: row i is what follows token i. The draft's are wrong in every way: too
# sure, too unsure, without a token that is needed, with one that must never come.
VERIFIER = torch.tensor(
    [[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.4, 0.4], [0.25, 0.25, 0.25, 0.25], [0.0, 0.9, 0.05, 0.05]]
)
DRAFTS = {
    "another": torch.tensor(
        [[0.1, 0.1, 0.1, 0.7], [0.8, 0.2, 0.0, 0.0], [0.0, 0.4, 0.6, 0.0], [0.25, 0.25, 0.25, 0.25]]
    ),
    "the same": VERIFIER,
    "fewer tokens": torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.2, 0.7], [0.5, 0.4, 0.1]]),
}


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=list(DRAFTS))
def test_accepted_blocks_have_the_verifiers_distribution(draft: torch.Tensor) -> None:
    """Three tokens after token 0, blocks of two proposals; a chi-square over all 64 triples."""
    generator = torch.Generator().manual_seed(7)

    def after(chain: torch.Tensor, token: int) -> int:
        return int(chain[token].multinomial(1, generator=generator))

    counts: dict[tuple[int, ...], int] = {}
    accepted = 0
    for _ in range(6000):
        first = after(draft, 0)
        block = [first, after(draft, first)]
        q, p = draft[[0, first]], VERIFIER[[0, *block]]
        emitted = accept_sampled(block, q, p, generator)
        accepted += len(emitted) - 1
        while len(emitted) < 3:
            emitted.append(after(VERIFIER, emitted[-1]))
        counts[tuple(emitted)] = counts.get(tuple(emitted), 0) + 1
    triples = list(product(range(4), repeat=3))
    expected = [float(VERIFIER[0, a] * VERIFIER[a, b] * VERIFIER[b, c]) for a, b, c in triples]
    require_distribution([counts.get(triple, 0) for triple in triples], expected)
    assert accepted == 12000 if draft is VERIFIER else 2000 < accepted < 11000


def test_without_a_proposal_the_verifier_draws() -> None:
    certain = torch.tensor([[0.0, 0.0, 1.0]])
    assert accept_sampled([], certain[:0], certain, None) == [2]


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 4.0]])
    expected = torch.tensor([[1.0, torch.e, torch.e**2]]) / (1 + torch.e + torch.e**2)
    torch.testing.assert_close(distribution(logits, 2.0), expected)
    assert choose(logits, 0.0, None).tolist() == [2]
    generator = torch.Generator().manual_seed(0)
    drawn = choose(logits.expand(4000, 3), 2.0, generator)
    require_distribution(drawn.bincount(minlength=3).tolist(), expected[0].tolist())


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_a_temperature_that_means_nothing_is_refused(
    temperature: float, random_model: object
) -> None:
    with pytest.raises(InputError, match=r"0 \(always the best token\) or a positive number"):
        generate(random_model(), None, torch.zeros(5), 3, temperature=temperature)  # type: ignore[operator, arg-type]
