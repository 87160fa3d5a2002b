"""A map on contexts of several lengths, also longer ones than it was fitted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.evaluate.arms import mapped
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.diagnosis.diagnosis import LengthRow
from trtllm_kvmap.evaluate.probe import ask
from trtllm_kvmap.evaluate.reading import judge, read_item
from trtllm_kvmap.evaluate.run import DRAWING_SEED, EvaluationConfig, require_scorable
from trtllm_kvmap.evaluate.score import Score
from trtllm_kvmap.evaluate.summary import Draws, gap
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

ARMS = ("mapped", "source", "target")


def by_length(
    bridge: KvBridge, longer: Mapping[int, Sequence[Item]], config: EvaluationConfig
) -> list[LengthRow]:
    """One row for each length in ``longer``, in rising order. Raises InputError for items without a
    continuation or without what ``config.metric`` needs.
    """
    return [_row(bridge, tokens, longer[tokens], config) for tokens in sorted(longer)]


def calibrated_tokens(kvmap: KvMap) -> int | None:
    """The longest document that the map can have been fitted on; None when it does not say."""
    configs = [record.get("config", {}) for record in kvmap.fitted.get("moments", ())]
    lengths = [config["max_tokens"] for config in configs if "max_tokens" in config]
    return max(lengths, default=None)


def _row(
    bridge: KvBridge, tokens: int, items: Sequence[Item], config: EvaluationConfig
) -> LengthRow:
    require_scorable(items, "nll")
    require_scorable(items, config.metric)
    assert isinstance(bridge.source, LoadedModel)  # diagnose was given one
    planner = partial(
        plan_handoff, first_tokens=config.first_tokens, repair_window=config.repair_window
    )
    scores: dict[str, list[Score]] = {arm: [] for arm in ARMS}
    divergence, asked = [], []
    for item in items:
        reading = read_item(bridge.source, bridge.target, item, (), rollout_steps=1)
        ready = {
            "mapped": mapped(bridge, planner, reading),
            "source": reading.source,
            "target": reading.target,
        }
        for arm in ARMS:
            judged = judge(ready[arm], reading, length_normalised=config.length_normalised)
            scores[arm].append(judged.score)
        answers = ask(ready["mapped"], reading.script.tree)
        divergence.append(kl_divergence(answers.log_probs, reading.answers.log_probs))
        asked.append(len(answers.log_probs))
    counts = draw(len(items), config.resamples, DRAWING_SEED)
    draws = {arm: Draws(each, counts) for arm, each in scores.items()}
    known, longest = calibrated_tokens(bridge.kvmap), max(len(item.context) for item in items)
    recovered = gap(draws["mapped"], draws["source"], draws["target"], config.metric)
    return LengthRow(
        tokens=tokens,
        beyond_calibration=None if known is None else longest > known,
        nll=figure(draws["mapped"].nll).to_json(),
        source_nll=figure(draws["source"].nll).to_json(),
        target_nll=figure(draws["target"].nll).to_json(),
        gap_recovered=figure(recovered).to_json(),
        accuracy=figure(draws["mapped"].accuracy).to_json(),
        source_accuracy=figure(draws["source"].accuracy).to_json(),
        target_accuracy=figure(draws["target"].accuracy).to_json(),
        divergence=figure((counts @ np.array(divergence)) / (counts @ np.array(asked))).to_json(),
    )


def kl_divergence(log_probs: torch.Tensor, native: torch.Tensor) -> float:
    """The sum over rows of KL(native || this), nats; both are log-probabilities [rows, vocab]."""
    return float(
        torch.nn.functional.kl_div(
            log_probs.double(), native.double(), reduction="sum", log_target=True
        )
    )
