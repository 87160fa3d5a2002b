"""What a guard lets through and what it takes back, tiny-s to tiny-m (run it through bench.py).

The guard is set as `trtllm-kvmap guard` sets it, on documents of its own and damaged copies of the
map, and then meets traffic that it was not set on. A map is bad for a request when the target
answers fewer of the questions about the document than the source alone. Every request is handed
over twice, with 64 tokens computed that the source attends to and with 32, and judged by two
guards, without the recall and with it. The classes:

good              documents as the models were trained on, 256 to 1,024 tokens
wrong revision    the source's weights were changed since the fit: a touch (1 to 3 %) or a lot
                  (25 to 50 % of each matrix's deviation), half and half
layer permuted    one layer of the source's cache arrives with its channels in another order
out of domain     no fact is told, each is asked and answered; the map never saw a question
beyond length     1,100 to 1,600 tokens; the map was calibrated on 200, the models on 1,024

Two further classes are reported apart, because map and source answer about equally well there: a
revision in between, and conversations.

What a guard costs is the time of a hand-over that it lets stand over the target's own prefill of
the same prompt, in turns of one run, beside a hand-over without one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from bench_map import ratio
from bench_repair import slice_map

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.guard.guarded import hand_over_guarded
from trtllm_kvmap.decode.guard.signals import BANDS
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.select_tokens import rank_by_attention
from trtllm_kvmap.evaluate.damage import with_order
from trtllm_kvmap.evaluate.guard import Case, GuardConfig, quality, rates, run_case, set_guard
from trtllm_kvmap.evaluate.reading import Reading, read_context, read_item
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import TOKEN_ID

CASES, SET_ITEMS, SET_SEED, SEED = 300, 40, 204, 205
QUESTIONS = 128  # about each document: fewer, and chance decides what is called bad
SAID = 16  # of them are asked and answered in a conversation's prompt
CONFIGS = {
    f"attended_{count}": GuardConfig(
        first_tokens=4, repair_window=32, selected_tokens=count, recall=True
    )
    for count in (64, 32)
}
RECALL = "_with_recall"
METRIC = GuardConfig().metric
LONG = 1100, 1600
LENGTHS, ROUNDS = (1024, 2048), 9
CLASSES = ("good", "wrong revision", "layer permuted", "out of domain", "beyond length")
APART_LESS = 3  # times fewer cases of what is reported apart
APART = ("revision in between", "conversation")

# (class, the case by every configuration, the native target's quality)
Traffic = Iterator[tuple[str, dict[str, Case], float]]


def bench_guard(cases: int = CASES) -> dict[str, Any]:
    """The figures of `bench.py guard`, see the module."""
    source, target = (load_model(model_folder(name)) for name in ("tiny-s", "tiny-m"))
    bridge = KvBridge(slice_map(source, target), source=source, target=target)
    items = [recapped(item) for item in documents(target, SET_ITEMS, SET_SEED)]
    guards: dict[str, Guard] = {}
    for name, config in CONFIGS.items():
        guard = set_guard(bridge.kvmap, source, target, items, config)
        guards |= {name: replace(guard, recalling=None), f"{name}{RECALL}": guard}
    met: dict[str, dict[str, list[Met]]] = {
        guard: {name: [] for name in CLASSES + APART} for guard in guards
    }
    for name, cases_of, native in chain(told_usually(bridge, cases), told_otherwise(bridge, cases)):
        for by, guard in guards.items():
            case = cases_of[by.removesuffix(RECALL)]
            verdict = guard.judge(case.signals)
            met[by][name].append(Met(case, native, verdict.drift, verdict.applied))
    found = {by: summary(met[by]) for by in guards}
    first, *others = guards
    return {
        **found[first],
        "others": {by: found[by] for by in others},
        "apart": list(APART),
        "guards": {name: guards[name + RECALL].to_json() for name in CONFIGS},
        "time_to_prefill": {str(length): time_to_prefill(bridge, length) for length in LENGTHS},
    }


def time_to_prefill(bridge: KvBridge, length: int) -> dict[str, float]:
    """Of a hand-over of ``length`` tokens by the first configuration, ranking not counted: without
    a guard, with one that measures no recall, and with one that does.
    """
    config = next(iter(CONFIGS.values()))
    drifts = 2 * min(BANDS, bridge.target.spec.num_layers)
    recalling = Guard((0.0,) * (3 + drifts), 0.0, 1.0, {})
    plain = Guard((0.0,) * (2 + drifts), 0.0, 1.0, {})
    guards = {"unguarded": None, "plain": plain, "recall": replace(plain, recalling=recalling)}
    told = chain.from_iterable(item.context for item in documents(bridge.target, 12, SEED))
    ids = list(islice(told, length))
    cache = read_context(bridge.source, ids).cache
    plan = plan_handoff(
        length, first_tokens=config.first_tokens, repair_window=config.repair_window
    )
    ranked = rank_by_attention(bridge.source, cache, ids, plan)
    plan = plan.with_selected(ranked, plan.num_computed + config.selected_tokens)
    return {
        name: ratio(
            partial(hand_over_guarded, bridge, guard, cache, ids, plan),
            partial(prefill, bridge.target, ids, logits_to_keep=1),
            ROUNDS,
        )
        for name, guard in guards.items()
    }


@dataclass(frozen=True)
class Met:
    """A case, the native target's quality on it, and what the guard made of it."""

    case: Case
    native: float
    score: float
    applied: bool


def summary(met: dict[str, list[Met]]) -> dict[str, Any]:
    """What one guard made of all classes, and of each."""
    counted = [one for name, each in met.items() if name not in APART for one in each]
    total = figures(counted)
    return {
        "false_fallback_rate": total["false_fallback_rate"],
        "missed_bad_rate": total["missed_bad_rate"],
        "roc": roc(counted),
        "classes": {"all": total, **{name: figures(each) for name, each in met.items()}},
    }


def figures(met: list[Met]) -> dict[str, Any]:
    """Rates, and the mean accuracy of everyone concerned; ``guarded`` is mapped where the guard
    let it stand and native where it did not.
    """
    bad, fell_back = np.array([[one.case.bad, not one.applied] for one in met]).T
    guarded = [one.case.mapped if one.applied else one.native for one in met]
    return {
        **rates(fell_back, bad),
        "missed_by": sorted(
            one.case.source - one.case.mapped for one in met if one.case.bad and one.applied
        ),
        "accuracy": {
            "source": float(np.mean([one.case.source for one in met])),
            "mapped": float(np.mean([one.case.mapped for one in met])),
            "guarded": float(np.mean(guarded)),
            "target": float(np.mean([one.native for one in met])),
        },
    }


def roc(met: list[Met]) -> list[dict[str, float]]:
    """Both rates at limits between the lowest and the highest score, and the limit."""
    scores, bad = np.array([one.score for one in met]), np.array([one.case.bad for one in met])
    points = []
    for limit in np.quantile(scores, np.linspace(0, 1, 41)):
        at = rates(scores >= limit, bad)
        points.append(
            {
                "limit": float(limit),
                "false_fallback_rate": at["false_fallback_rate"],
                "missed_bad_rate": at["missed_bad_rate"],
            }
        )
    return points


def told_usually(bridge: KvBridge, cases: int) -> Traffic:
    """The classes in which only the map or the source's revision differs; they share documents."""
    target = bridge.target
    for n, item in enumerate(map(recapped, documents(target, cases, SEED))):
        reading = read_item(bridge.source, target, item, (), rollout_steps=1)
        native = quality(reading.target, reading, METRIC)
        alone = quality(reading.source, reading, METRIC)
        yield "good", run_cases(bridge, reading, alone), native
        yield "layer permuted", run_cases(permuted(bridge, n), reading, alone), native
        revisions = {"wrong revision": ((0.01, 0.03), (0.25, 0.5))[n % 2]}
        if n < cases // APART_LESS:
            revisions["revision in between"] = (0.03, 0.25)
        for name, noise in revisions.items():
            other = revised(bridge, n, *noise)
            seen = replace(reading, source=read_context(other.source, item.context))
            alone = quality(seen.source, seen, METRIC)
            yield name, run_cases(other, seen, alone), native


def told_otherwise(bridge: KvBridge, cases: int) -> Traffic:
    """The classes in which the text differs."""
    target = bridge.target
    texts = {
        "out of domain": map(asked, documents(target, cases, SEED + 1)),
        "conversation": map(conversed, documents(target, cases // APART_LESS, SEED + 2)),
        "beyond length": map(recapped, documents(target, cases, SEED + 3, *LONG)),
    }
    for name, items in texts.items():
        for item in items:
            reading = read_item(bridge.source, target, item, (), rollout_steps=1)
            alone, native = (
                quality(ready, reading, METRIC) for ready in (reading.source, reading.target)
            )
            yield name, run_cases(bridge, reading, alone), native


def run_cases(bridge: KvBridge, reading: Reading, alone: float) -> dict[str, Case]:
    """run_case by every configuration."""
    return {name: run_case(bridge, reading, alone, config) for name, config in CONFIGS.items()}


def documents(
    target: LoadedModel, count: int, seed: int, shortest: int = 256, longest: int = 1024
) -> list[Item]:
    """Items of the task `tiny`, those of at least ``shortest`` tokens."""
    config = TaskConfig(context_tokens=longest, questions=QUESTIONS, seed=seed)
    found: list[Item] = []
    while len(found) < count:
        config = replace(config, num_items=2 * count, skip=config.skip + config.num_items)
        items = read_items(config, target.tokenizer)
        found += [item for item in items if len(item.context) >= shortest]
    return found[:count]


def recapped(item: Item) -> Item:
    """The document goes on with facts said again, so that its end can be known from its body."""
    return Item(item.context + item.continuation, item.questions)


def asked(item: Item) -> Item:
    """``so first after anna ben`` instead of ``after anna ben``."""
    so, first, after, again = (TOKEN_ID[word] for word in ("so", "first", "after", "again"))
    written: list[int] = []
    for token in item.context:
        told = token == after and written[-1] != again
        written += [so, first, after] if told else [token]
    return Item(tuple(written), item.questions)


def conversed(item: Item) -> Item:
    """Some of the questions were asked and answered in the prompt."""
    said = [question.stem + question.choices[question.label] for question in item.questions[:SAID]]
    return Item(item.context + sum(said, ()), item.questions[SAID:])


def revised(bridge: KvBridge, seed: int, least: float, most: float) -> KvBridge:
    """The bridge as it would be if the source's weights had changed and nobody had noticed: every
    matrix moved by between ``least`` and ``most`` of its standard deviation.
    """
    rng = np.random.default_rng([SEED, seed])
    noise = float(np.exp(rng.uniform(np.log(least), np.log(most))))
    model = copy.deepcopy(bridge.source.model)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            drawn = torch.from_numpy(rng.standard_normal(parameter.shape)).float()
            parameter.data += noise * parameter.data.std() * drawn
    loaded = replace(bridge.source, model=model)
    kvmap = replace(bridge.kvmap, source_fingerprint=loaded.fingerprint)
    return KvBridge(kvmap, source=loaded, target=bridge.target)


def permuted(bridge: KvBridge, seed: int) -> KvBridge:
    """The bridge over a source cache of which one layer's channels lie in another order."""
    kvmap, rng = bridge.kvmap, np.random.default_rng([SEED, seed])
    order = torch.from_numpy(rng.permutation(kvmap.source.head_dim))
    layer = int(rng.integers(kvmap.source.num_layers))
    groups: list[HeadGroup] = [with_order(kvmap, group, layer, order) for group in kvmap.groups]
    return KvBridge(
        replace(kvmap, groups=tuple(groups)), source=bridge.source, target=bridge.target
    )
