"""The nearest layer as it is, the last tokens read again, and adaptive speculation.

Nothing is learned: each target layer takes the keys and values of the source layer at the nearest
depth, the target computes the last N tokens of the prompt, and the source drafts 4 to 24 tokens for
it. A table over N, a map judged at one N, and the time of whole answers against both models alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.arms import REPAIR_WINDOWS, mapped_arm
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.recipes.answers import Answerer, drafts_row, over_native
from trtllm_kvmap.recipes.outcome import Outcome
from trtllm_kvmap.recipes.pair import Pair, PairConfig
from trtllm_kvmap.recipes.steps import (
    Progress,
    arm_rows,
    judged_map,
    moments_of,
    said,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PairConfig):
    """``answers`` contexts of the report are answered with ``new_tokens``, ``rounds`` times."""

    draft: DraftLength
    temperature: float
    answers: int
    new_tokens: int
    rounds: int

    def __post_init__(self) -> None:
        if min(self.answers, self.rounds) < 1 or self.new_tokens < 2:
            raise InputError("answers and rounds must be at least 1, new_tokens at least 2.")


def run(config: Config, pair: Pair, on_progress: Progress) -> Outcome:
    """The moments that the fit is given say only how good the copy is."""
    kvmap = fit(moments_of(pair, config.calibration, on_progress), FitConfig(scope="copy"))
    judged = judged_map(pair, kvmap, config.judged, on_progress)
    windows = sorted({0, *REPAIR_WINDOWS, config.judged.repair_window})
    arms = {
        "native target": "target",
        "native source": "source",
        **{f"mapped, repair {n}": mapped_arm(n) for n in windows},
        "repair alone": "repair_only",
    }
    figures = {"accuracy": "accuracy", "NLL": "nll", "gap recovered": "gap_recovered"}
    answerer = Answerer(
        bridge=KvBridge(kvmap, source=pair.source, target=pair.target),
        source=pair.source,
        judged=config.judged,
        draft=config.draft,
        temperature=config.temperature,
        new_tokens=config.new_tokens,
    )
    prompts = [item.context for item in pair.report[: config.answers]]
    times = answerer.take_turns(prompts, config.rounds, on_progress)
    drafts = drafts_row(times)
    gap = judged.report.gap_recovered
    return Outcome(
        judged={"copy": judged},
        tables={
            "last tokens that the target reads again": arm_rows(judged, arms, figures),
            f"answers of {config.new_tokens} tokens, over the native target's": over_native(times),
            "speculation": [drafts],
        },
        sentence=(
            f"nearest-depth copy and repair {config.judged.repair_window} recover {said(gap)} of "
            f"the gap; {drafts['acceptance rate']:.0%} of the drafts were accepted"
        ),
    )
