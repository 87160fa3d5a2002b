"""One matrix for each head over few source layers, and controls before any figure.

Whether the two models fit, whether decoding from a cache says what reading it all says, and then
everything that evaluate checks: reinjection, RoPE there and back, equal bytes, damage found. Only
then k by k against the native target and direct injection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_kvmap.decode.generate import near_ties
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import InputError, UnprovenError
from trtllm_kvmap.evaluate.controls import run_controls
from trtllm_kvmap.evaluate.reading import read_item
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.models import LoadedModel, require_same_tokens
from trtllm_kvmap.recipes.outcome import Outcome, Row
from trtllm_kvmap.recipes.pair import Pair, PairConfig
from trtllm_kvmap.recipes.steps import Progress, arm_rows, judged_map, moments_of, said

NEAR = 1e-3  # logits closer than this may change places between two ways to compute them


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PairConfig):
    """``k``: how many source layers a head reads, one map for each."""

    k: tuple[int, ...]
    ridge: float

    def __post_init__(self) -> None:
        if not self.k:
            raise InputError("k needs at least one number of source layers.")


def run(config: Config, pair: Pair, on_progress: Progress) -> Outcome:
    controls: list[Row] = []
    require_same_tokens(pair.source, pair.target)
    controls.append({"control": "one tokenizer for both models", "found": "passed"})
    for loaded in (pair.source, pair.target):
        require_cached_decode(loaded, pair.report[0].context)
        controls.append({"control": f"cached decode of {loaded.name}", "found": "passed"})
    moments = moments_of(pair, config.calibration, on_progress)
    maps = {k: fit(moments, FitConfig(scope="head", k=k, ridge=config.ridge)) for k in config.k}
    reading = read_item(
        pair.source, pair.target, pair.report[0], (), rollout_steps=config.judged.rollout_steps
    )
    found = run_controls(maps[config.k[0]], reading)
    controls += [{"control": name, "found": how} for name, how in found.items()]

    judged = {
        f"head-k{k}": judged_map(pair, kvmap, config.judged, on_progress)
        for k, kvmap in maps.items()
    }
    first = next(iter(judged.values()))
    figures = {
        "accuracy": "accuracy",
        "above chance": "retention_normalised",
        "gap recovered": "gap_recovered",
        "top-1": "top1_agreement",
        "perplexity": "perplexity",
    }
    alone = {"native target": "target", "native source": "source", "direct injection": "copy"}
    rows = arm_rows(first, alone, figures)
    for name, each in judged.items():
        rows += arm_rows(each, {name: each.report.config["arm"]}, figures)
    told = [
        f"k = {k} recovers {said(each.report.gap_recovered)}"
        for k, each in zip(config.k, judged.values(), strict=True)
    ]
    return Outcome(
        judged=judged,
        tables={"controls, before any figure": controls, "arms": rows},
        sentence=f"{len(controls)} controls passed; {', '.join(told)} of the gap",
    )


def require_cached_decode(loaded: LoadedModel, token_ids: tuple[int, ...]) -> None:
    """Raise UnprovenError unless reading in two pieces, the second on the first's cache, predicts
    the same tokens as reading all at once, near ties apart.
    """
    half = max(len(token_ids) // 2, 1)
    whole = prefill(loaded, token_ids).logits[half:]
    cache = prefill(loaded, token_ids[:half], logits_to_keep=1).cache
    pieces = prefill(loaded, token_ids[half:], cache).logits
    tied = {tie.step for tie in near_ties(whole, NEAR)}
    differ = torch.nonzero(whole.argmax(-1) != pieces.argmax(-1)).flatten().tolist()
    if set(differ) - tied:
        raise UnprovenError(
            f"The control cached decode failed: {loaded.name} says something else after token "
            f"{half + min(set(differ) - tied)} when it reads in two pieces. No figure of this run "
            f"can be trusted; is its attention causal and its cache exact?"
        )
