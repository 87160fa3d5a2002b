"""Items and arms that the evaluate tests share."""

from __future__ import annotations

import numpy as np

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.evaluate import arms
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.evaluate.tasks.items import Item, Question
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.tiny.documents import VOCABULARY

QUICK = EvaluationConfig(resamples=50, rollout_steps=4)


def make_item(seed: int, tokens: int = 60) -> Item:
    """A random context with two questions (one with a stem, one with long choices) and a
    continuation of seven tokens.
    """
    rng = np.random.default_rng(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(2, len(VOCABULARY), count).tolist())

    questions = (
        Question(draw(3), (draw(1), draw(1), draw(1)), 1),
        Question((), (draw(2), draw(4)), 0),
    )
    return Item((1, *draw(tokens - 1)), questions, draw(7))


ITEMS = [make_item(seed, tokens) for seed, tokens in enumerate((60, 45, 75))]


def arms_of(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    *,
    first_tokens: int = 1,
    repair_window: int = 32,
) -> dict[str, arms.Arm]:
    bridge, copied = (
        KvBridge(m, source=source, target=target) for m in (kvmap, arms.copy_map(kvmap))
    )
    return arms.make_arms(bridge, copied, first_tokens=first_tokens, repair_window=repair_window)
