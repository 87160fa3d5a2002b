"""What a guard lets through and what it takes back, tiny-s to tiny-m (run it through bench.py).

A guard is set as `trtllm-kvmap guard` sets it, on documents and conversations of its own and
damaged copies of the map, another on the same without a look at how hard the text is to the source,
and one on the documents alone; each without the recall and with it. They then meet requests that
they were not set on. A map is bad for a request when the target answers fewer of the questions
about the document than the source alone. 64 tokens are computed that the source attends to. The
kinds of traffic:

documents         as the models were trained on, 256 to 1,024 tokens, some of it said again
conversations     documents about which 16 questions were asked and answered; the map never saw a
                  question
out of domain     no fact is told, each is asked and answered; no guard saw such text
beyond length     documents of 1,100 to 1,600 tokens; the map was calibrated on 200, the models on
                  1,024

and what goes wrong with them:

wrong revision    the source's weights were changed since the fit: a touch (1 to 3 %) or a lot
                  (25 to 50 % of each matrix's deviation), half and half
layer permuted    one layer of the source's cache arrives with its channels in another order

Further classes are reported apart: a revision in between, where map and source answer about equally
well, and what goes wrong with text out of domain.

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
from trtllm_kvmap.evaluate.guard import (
    Case,
    GuardConfig,
    damaged_cases,
    fit_guard,
    quality,
    rates,
    run_case,
)
from trtllm_kvmap.evaluate.reading import read_context, read_item
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tasks.named import TaskConfig, read_items
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.plan import plan_handoff
from trtllm_kvmap.tiny import model_folder
from trtllm_kvmap.tiny.documents import TOKEN_ID

CASES, SET_ITEMS, SET_SEED, SEED = 200, 40, 214, 216
QUESTIONS = 128  # about each document: fewer, and chance decides what is called bad
SAID = 16  # of them are asked and answered in a conversation's prompt
CONFIG = GuardConfig(first_tokens=4, repair_window=32, selected_tokens=64, recall=True)
RECALL = ", with recall"
LONG = 1100, 1600
LENGTHS, ROUNDS = (1024, 2048), 9
WRONG, PERMUTED, BETWEEN = ", wrong revision", ", layer permuted", ", revision in between"
DOCUMENTS, CONVERSATIONS, FOREIGN, LONGER = (
    "documents",
    "conversations",
    "out of domain",
    "beyond length",
)
CLASSES = (
    *(kind + wrong for kind in (DOCUMENTS, CONVERSATIONS) for wrong in ("", WRONG, PERMUTED)),
    FOREIGN,
    LONGER,
)
APART_LESS = 3  # times fewer cases of what is reported apart
APART = (DOCUMENTS + BETWEEN, CONVERSATIONS + BETWEEN, FOREIGN + WRONG, FOREIGN + PERMUTED)

# (class, the case, the native target's quality)
Traffic = Iterator[tuple[str, Case, float]]


def bench_guard(cases: int = CASES) -> dict[str, Any]:
    """The figures of `bench.py guard`, see the module."""
    source, target = (load_model(model_folder(name)) for name in ("tiny-s", "tiny-m"))
    bridge = KvBridge(slice_map(source, target), source=source, target=target)
    items = {
        DOCUMENTS: [recapped(item) for item in documents(target, SET_ITEMS, SET_SEED)],
        CONVERSATIONS: [conversed(item) for item in documents(target, SET_ITEMS, SET_SEED + 1)],
    }
    cases_set = damaged_cases(bridge.kvmap, source, target, items, CONFIG)
    guards: dict[str, Guard] = {}
    both = f"{DOCUMENTS} and {CONVERSATIONS}"
    for name, shown in (
        (both, cases_set),
        (f"{both}, blind to the source's loss", [equally_hard(case) for case in cases_set]),
        (DOCUMENTS, [case for case in cases_set if case.kind == DOCUMENTS]),
    ):
        guard = fit_guard(shown, CONFIG, [])
        guards |= {name: replace(guard, recalling=None), name + RECALL: guard}
    met: dict[str, dict[str, list[Met]]] = {
        guard: {name: [] for name in CLASSES + APART} for guard in guards
    }
    for name, case, native in traffic(bridge, cases):
        for by, guard in guards.items():
            verdict = guard.judge(case.signals)
            met[by][name].append(Met(case, native, verdict.drift, verdict.applied))
    found = {by: summary(met[by]) for by in guards}
    first, *others = guards
    return {
        **found[first],
        "others": {by: found[by] for by in others},
        "apart": list(APART),
        "guards": {by: guard.to_json() for by, guard in guards.items() if guard.recalling},
        "time_to_prefill": {str(length): time_to_prefill(bridge, length) for length in LENGTHS},
    }


def equally_hard(case: Case) -> Case:
    """``case`` as if every text were equally hard: a signal that never moves gets no weight."""
    return replace(case, signals=replace(case.signals, source_loss=1.0))


def time_to_prefill(bridge: KvBridge, length: int) -> dict[str, float]:
    """Of a hand-over of ``length`` tokens, ranking not counted: without a guard, with one that
    measures no recall, and with one that does.
    """
    drifts = 2 * min(BANDS, bridge.target.spec.num_layers)
    recalling = Guard((0.0,) * (4 + drifts), 0.0, 1.0, {})
    plain = Guard((0.0,) * (3 + drifts), 0.0, 1.0, {})
    guards = {"unguarded": None, "plain": plain, "recall": replace(plain, recalling=recalling)}
    told = chain.from_iterable(item.context for item in documents(bridge.target, 12, SEED))
    ids = list(islice(told, length))
    cache = read_context(bridge.source, ids).cache
    plan = plan_handoff(
        length, first_tokens=CONFIG.first_tokens, repair_window=CONFIG.repair_window
    )
    ranked = rank_by_attention(bridge.source, cache, ids, plan)
    plan = plan.with_selected(ranked, plan.num_computed + CONFIG.selected_tokens)
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


def traffic(bridge: KvBridge, cases: int) -> Traffic:
    """``cases`` of every class, and fewer of those apart. What goes wrong goes wrong with the same
    texts.
    """
    target, fewer = bridge.target, cases // APART_LESS
    for kind, written, seed in (
        (DOCUMENTS, recapped, SEED),
        (CONVERSATIONS, conversed, SEED + 1),
        (FOREIGN, asked, SEED + 2),
    ):
        for n, item in enumerate(map(written, documents(target, cases, seed))):
            yield from told(bridge, kind, n, item, fewer)
    for item in map(recapped, documents(target, cases, SEED + 3, *LONG)):
        yield from told(bridge, LONGER, cases, item, fewer)


def told(bridge: KvBridge, kind: str, n: int, item: Item, fewer: int) -> Traffic:
    """``item``, the ``n``-th of its kind, and all that goes wrong with it in any class."""
    reading = read_item(bridge.source, bridge.target, item, (), rollout_steps=1)
    alone, native = (
        quality(ready, reading, CONFIG.metric) for ready in (reading.source, reading.target)
    )
    yield kind, run_case(bridge, reading, alone, CONFIG), native
    in_class = [name for name in CLASSES + APART if name in CLASSES or n < fewer]
    if kind + PERMUTED in in_class:
        yield kind + PERMUTED, run_case(permuted(bridge, n), reading, alone, CONFIG), native
    for wrong, noise in ((WRONG, ((0.01, 0.03), (0.25, 0.5))[n % 2]), (BETWEEN, (0.03, 0.25))):
        if kind + wrong in in_class:
            other = revised(bridge, n, *noise)
            seen = replace(reading, source=read_context(other.source, item.context))
            alone = quality(seen.source, seen, CONFIG.metric)
            yield kind + wrong, run_case(other, seen, alone, CONFIG), native


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
