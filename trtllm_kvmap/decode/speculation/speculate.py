"""Speculative decoding after a hand-over: the source drafts on its exact cache, the target verifies
on its mapped one.

The source has read the prompt already, so drafting costs no second prefill. Leviathan et al. 2023
(arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) describe the method.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.sampling import choose, distribution, require_temperature
from trtllm_kvmap.decode.speculation.accept import accept_greedy, accept_sampled
from trtllm_kvmap.decode.speculation.draft_admission import require_steady, shared_mask
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.decode.speculation.drafted_row import DraftedRow
from trtllm_kvmap.decode.speculation.propose import Block, propose
from trtllm_kvmap.decode.speculation.ragged import RaggedRows
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache
from trtllm_kvmap.models import LoadedModel


@dataclass(frozen=True, slots=True)
class Speculation:
    """What was generated, and the two caches to go on from.

    ``rows`` are the new tokens of each sequence. Both caches hold the prompt and all new tokens but
    each row's last, which has not been read, as after generate(); ``attention_mask`` int64 [batch,
    entries] has 0 for the left pads of both. The draft's cache is its own reading throughout; the
    verifier's stands on mapped entries where it did before, so all that was added is approximate.

    ``proposed`` and ``accepted`` count draft tokens, ``verifier_steps`` passes of the verifier, and
    ``row_steps`` the rows that took part in them.
    """

    rows: list[list[int]]
    draft_cache: HfCache
    verifier_cache: HfCache
    attention_mask: torch.Tensor
    proposed: int
    accepted: int
    verifier_steps: int
    row_steps: int

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed tokens."""
        return self.accepted / max(self.proposed, 1)

    @property
    def acceptance_length(self) -> float:
        """Tokens that one row emits per verify step."""
        return self._verified / max(self.row_steps, 1)

    @property
    def tokens_per_verifier_step(self) -> float:
        """Tokens that the whole batch emits per pass of the verifier."""
        return self._verified / max(self.verifier_steps, 1)

    @property
    def _verified(self) -> int:
        """All tokens but the first of each row, which the given logits chose."""
        return sum(len(row) - 1 for row in self.rows)


def speculate(
    draft: LoadedModel,
    verifier: LoadedModel,
    draft_cache: HfCache,
    verifier_cache: HfCache,
    logits: torch.Tensor,
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    draft_length: DraftLength | None = None,
    attention_mask: torch.Tensor | None = None,
) -> Speculation:
    """What ``verifier`` alone would generate, in fewer of its passes.

    At temperature 0 the tokens are those of generate() from the same ``verifier_cache`` (two tokens
    whose logits differ by rounding alone may change places, see generate.near_ties). At a higher
    temperature they have the distribution of the verifier's own samples, whatever the draft says.

    Both caches hold the same tokens, one sequence or a left-padded batch (``attention_mask``
    [batch, entries], 0 for a pad), and are not changed; ``logits`` [vocab_size] or [batch,
    vocab_size] are the verifier's after the last of them. Each row has its own block length by
    ``draft_length`` (None: DraftLength()) and ends with the first of ``eos_token_ids``.

    Raises InputError before anything runs when the caches differ in tokens or a model has no room,
    and MismatchError for a batch whose RoPE frequencies would change on the way: they follow the
    longest row of a pass, which no row alone would. One sequence is drafted only as far as the
    frequencies stay what plain decoding would use.
    """
    policy = draft_length or DraftLength()
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    require_temperature(temperature)
    logits = logits.reshape(-1, logits.shape[-1])
    mask = shared_mask(draft_cache, verifier_cache, logits.shape[0], attention_mask, verifier)
    drafting = RaggedRows(draft, draft_cache, mask.to(draft.device))
    verifying = RaggedRows(verifier, verifier_cache, mask)
    for loaded in (draft, verifier):
        require_steady(loaded, max(verifying.lengths) + max_new_tokens, len(mask))
    rows = [DraftedRow(start, policy.shortest) for start in verifying.lengths]
    for row, token in zip(rows, choose(logits, temperature, generator).tolist(), strict=True):
        row.commit([token], max_new_tokens, eos_token_ids)
    verifier_steps = 0
    while not all(row.done for row in rows):
        blocks = propose(
            drafting,
            _unread(drafting, rows),
            [row.most_proposals(verifier, max_new_tokens) for row in rows],
            vocab_size=verifier.spec.vocab_size,
            temperature=temperature,
            generator=generator,
            confidence=policy.confidence,
        )
        answers = verifying.read(
            [
                [] if row.done else [row.tokens[-1], *block.tokens]
                for row, block in zip(rows, blocks, strict=True)
            ]
        )
        verifier_steps += 1
        for row, block, answer in zip(rows, blocks, answers, strict=True):
            if not row.done:
                count = len(block.tokens)
                emitted = _accept(block, answer[: count + 1], temperature, generator)
                taken = row.commit(emitted, max_new_tokens, eos_token_ids)
                row.proposed += count
                row.accepted += min(taken, len(emitted) - 1)
                row.steps += 1
                row.block_length = policy.following(row.block_length, count, len(emitted) - 1)
        read = [row.length - 1 for row in rows]
        verifying.settle(read)
        drafting.settle([min(pair) for pair in zip(drafting.lengths, read, strict=True)])
    unread = [tokens[:-1] for tokens in _unread(drafting, rows)]
    if any(unread):
        drafting.read(unread)
    for model in (drafting, verifying):
        model.settle([row.length - 1 for row in rows])
    return Speculation(
        rows=[row.tokens for row in rows],
        draft_cache=drafting.cache,
        verifier_cache=verifying.cache,
        attention_mask=verifying.mask.long(),
        proposed=sum(row.proposed for row in rows),
        accepted=sum(row.accepted for row in rows),
        verifier_steps=verifier_steps,
        row_steps=sum(row.steps for row in rows),
    )


def _unread(drafting: RaggedRows, rows: list[DraftedRow]) -> list[list[int]]:
    """The committed tokens of each row that the draft has not read: one, or two after a bonus."""
    return [
        row.tokens[held - row.start :] for held, row in zip(drafting.lengths, rows, strict=True)
    ]


def _accept(
    block: Block, answer: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> list[int]:
    if temperature == 0:
        return accept_greedy(block.tokens, answer)
    probabilities = distribution(answer, temperature)
    drawn_from = probabilities[:0]
    if block.drawn_from:
        drawn_from = torch.stack(block.drawn_from).to(answer.device)
    return accept_sampled(block.tokens, drawn_from, probabilities, generator)
