"""Which of a draft's proposals the verifier takes, and the token it adds.

A block of k proposals comes with the verifier's k + 1 predictions: row j is what the verifier says
after the first j of them. What is emitted is the accepted part and one token more, the verifier's
own: a correction where it disagreed, a bonus where it did not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.decode.sampling import draw


def accept_greedy(proposed: Sequence[int], logits: torch.Tensor) -> list[int]:
    """``proposed`` as far as it is what the verifier's greedy decoding says, then its next token.

    ``logits`` [len(proposed) + 1, vocab_size]. The result is what the verifier alone decodes
    greedily.
    """
    best = logits.argmax(-1).tolist()
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == best[accepted]:
        accepted += 1
    return best[: accepted + 1]


def accept_sampled(
    proposed: Sequence[int],
    draft: torch.Tensor,
    verifier: torch.Tensor,
    generator: torch.Generator | None,
) -> list[int]:
    """Rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023,
    arXiv 2302.01318): a proposal x drawn from q is accepted with probability min(1, p(x) / q(x));
    the first that is not is replaced by a draw from max(p - q, 0), normalised. Tokens are then
    distributed as if each had been drawn from p.

    ``draft`` [len(proposed), vocab_size] holds q, ``verifier`` [len(proposed) + 1, vocab_size]
    holds p. The draft's vocabulary may be shorter: it never proposes what it does not know.
    """
    known = draft.shape[-1]
    for index, token in enumerate(proposed):
        p, q = verifier[index], draft[index]
        chance = torch.rand((), generator=generator, device=p.device)
        if chance * q[token] < p[token]:
            continue
        rest = p.clone()
        rest[:known] = (p[:known] - q).clamp_min(0)
        if not bool(rest.sum() > 0):  # p = q up to rounding
            rest = p
        return [*proposed[:index], int(draw(rest[None], generator))]
    return [*proposed, int(draw(verifier[len(proposed)][None], generator))]
