"""What one arm scored on one item, as sums that add over items."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from trtllm_kvmap.evaluate.metrics import best_choice, cosine, leading_agreement
from trtllm_kvmap.evaluate.probe import Answers, Script


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over one item. Divide sums over items, never averages of averages.

    ``correct`` of ``questions`` answered, with ``chance`` expected of guessing; ``nll`` nats over
    ``tokens`` of the continuation, of which ``agreed`` have the native target's likeliest token;
    ``rolled`` of ``steps`` greedy tokens equal the native target's before the first difference.
    """

    correct: int
    questions: int
    chance: float
    nll: float
    tokens: int
    agreed: int
    rolled: int
    steps: int


def score(script: Script, answers: Answers, native: Answers, *, length_normalised: bool) -> Score:
    """Score the ``answers`` of one arm to ``script``; ``native`` are those of the native target.

    The rollout needs no decoding: greedy tokens equal the native target's exactly as long as each
    of those is also the arm's likeliest token after the ones before it.
    """
    item = script.item
    correct = 0
    for question, predictors in zip(item.questions, script.choices, strict=True):
        log_probs = [
            answers.token_log_probs(nodes, choice).tolist()
            for nodes, choice in zip(predictors, question.scored, strict=True)
        ]
        lengths = question.lengths if length_normalised else None
        correct += best_choice(log_probs, lengths) == question.label
    top1, native_top1 = (a.top1(script.continuation) for a in (answers, native))
    return Score(
        correct=correct,
        questions=len(item.questions),
        chance=sum(1 / len(question.choices) for question in item.questions),
        nll=-float(answers.token_log_probs(script.continuation, item.continuation).sum()),
        tokens=len(item.continuation),
        agreed=sum(a == b for a, b in zip(top1, native_top1, strict=True)),
        rolled=leading_agreement(answers.top1(script.predicted_rollout), script.rollout),
        steps=len(script.rollout),
    )


def attention_cosines(answers: Answers, native: Answers) -> np.ndarray:
    """float64 [layers]: the cosine of the attention outputs of two runs of one model, mean over
    the tokens asked.
    """
    pairs = zip(answers.attention, native.attention, strict=True)
    return np.array([float(cosine(mine, theirs).mean()) for mine, theirs in pairs])


def as_rows(scores: list[Score]) -> np.ndarray:
    """float64 [items, fields of Score]."""
    return np.array([astuple(score) for score in scores], dtype=np.float64)
