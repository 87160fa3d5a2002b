"""Whether a map refitted from traffic takes the old one's place: only with evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from trtllm_kvmap.artifact.evidence import unproven
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError, MismatchError, UnprovenError
from trtllm_kvmap.evaluate.arms import mapped
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.reading import judge, read_item
from trtllm_kvmap.evaluate.report.report import evidence
from trtllm_kvmap.evaluate.run import DRAWING_SEED, EvaluationConfig, evaluate
from trtllm_kvmap.evaluate.score import Score
from trtllm_kvmap.evaluate.summary import Draws, gap
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.fit import FitConfig, fit
from trtllm_kvmap.fit.layer_r2 import with_layer_r2
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

SCORED_SHARE, MOST_SCORED = 4, 128  # a quarter of a prompt is scored, at most so many tokens
FEWEST = 20  # prompts held out: half of them try the new map, half of them report on it

FigureJson = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Trial:
    """Old map against new on the same prompts. ``gain`` is the old one's loss minus the new one's,
    nats per token, paired; ``promoted`` only when its whole interval lies above zero. ``nll`` and
    ``gap_recovered`` (of nll) are by arm: old, new, and nll also of source and target alone.
    """

    promoted: bool
    prompts: int
    gain: FigureJson
    nll: dict[str, FigureJson]
    gap_recovered: dict[str, FigureJson]


def refit(old: KvMap, moments: MomentSet) -> KvMap:
    """The map that ``moments`` give with the configuration that ``old`` was fitted with; its sink
    table is the old one's, because traffic's moments carry none. It has no evidence yet.

    Raises InputError when ``old`` does not say how it was fitted, MismatchError for moments of
    another pair.
    """
    if "config" not in old.fitted:
        raise InputError("The map does not say how it was fitted; fit the moments yourself.")
    pair = moments.source_fingerprint, moments.target_fingerprint
    if pair != (old.source_fingerprint, old.target_fingerprint):
        raise MismatchError("The moments are of other models than the map; count their traffic.")
    new = with_layer_r2(fit(moments, FitConfig(**old.fitted["config"])), moments)
    return replace(new, sinks=old.sinks)


def traffic_items(prompts: Sequence[Sequence[int]]) -> list[Item]:
    """Prompts as items: the end of each, a quarter or MOST_SCORED tokens, is what is scored."""
    items = []
    for ids in prompts:
        cut = len(ids) - max(1, min(len(ids) // SCORED_SHARE, MOST_SCORED))
        if cut:
            items.append(Item(tuple(ids[:cut]), continuation=tuple(ids[cut:])))
    return items


def promote(
    old: KvMap,
    new: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    config: EvaluationConfig,
) -> tuple[KvMap, Trial]:
    """The map to serve with from now on, and the trial that decided.

    ``prompts`` (token ids) were held out of what ``new`` was fitted on; of those that differ only
    in what is scored, one counts. Every other one is for the trial; when ``new`` wins, the rest
    give the report whose evidence it then carries. Otherwise ``old`` stays, as it is. Of ``config``
    everything but ``metric`` is read, which is nll.

    Both halves ask whether the 95 % interval of a paired difference lies above zero. By chance that
    says 2.5 %, and is more for few prompts: a bootstrap of n takes the spread of their mean for
    sqrt((n - 1) / n) of what it is, so differences that are drawn from a normal distribution around
    zero pass as often as Student's t of n - 1 degrees of freedom lies above 1.96 sqrt((n - 1) / n):
    9 % of the time for 4, 5.1 % for 9, 4.8 % for 10. At most twice what the interval says is
    allowed, so each half has ten; more are better, above all where differences are skewed.

    Raises InputError for fewer than FEWEST different prompts, UnprovenError when a control of the
    report fails or the report does not prove ``new`` (see artifact.evidence.unproven),
    MismatchError for other models.
    """
    config = replace(config, metric="nll")
    items = list({item.digest: item for item in traffic_items(prompts)}.values())
    if len(items) < FEWEST:
        raise InputError(
            f"{len(items)} different prompts were held out; at least {FEWEST} are needed, so that "
            f"a map seldom passes by chance. Wait for more traffic, or give more prompts."
        )
    trial = compare(old, new, source, target, items[::2], config)
    if not trial.promoted:
        return old, trial
    proof = evidence(evaluate(new, source, target, items[1::2], config))
    if why := unproven(proof, new.map_digest()):
        raise UnprovenError(
            f"The new map beats the old one, but its report on the other prompts leaves it "
            f"unproven: {why}."
        )
    return new.with_evidence({**proof, "trial": asdict(trial)}), trial


def compare(
    old: KvMap,
    new: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    items: Sequence[Item],
    config: EvaluationConfig,
) -> Trial:
    """Both maps on the continuations of ``items``, each read once by both models."""
    bridges = {
        name: KvBridge(kvmap, source=source, target=target, backend=config.backend)
        for name, kvmap in (("old", old), ("new", new))
    }
    planner = partial(
        plan_handoff, first_tokens=config.first_tokens, repair_window=config.repair_window
    )
    scores: dict[str, list[Score]] = {name: [] for name in (*bridges, "source", "target")}
    for item in items:
        reading = read_item(source, target, item, (), rollout_steps=1)
        ready = {name: mapped(bridge, planner, reading) for name, bridge in bridges.items()}
        ready |= {"source": reading.source, "target": reading.target}
        for name, each in ready.items():
            scores[name].append(judge(each, reading, length_normalised=False).score)
    counts = draw(len(items), config.resamples, DRAWING_SEED)
    draws = {name: Draws(each, counts) for name, each in scores.items()}
    gain = figure(draws["old"].nll - draws["new"].nll)
    recovered: dict[str, Any] = {
        name: figure(gap(draws[name], draws["source"], draws["target"], "nll")).to_json()
        for name in bridges
    }
    return Trial(
        promoted=gain.low is not None and gain.low > 0,
        prompts=len(items),
        gain=gain.to_json(),
        nll={name: figure(each.nll).to_json() for name, each in draws.items()},
        gap_recovered=recovered,
    )
