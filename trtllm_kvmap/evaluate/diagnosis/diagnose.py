"""Runs a diagnosis: every intervention on every item, and errors by layer, token and length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.arms import Refused
from trtllm_kvmap.evaluate.asked import asked, versions
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.diagnosis.diagnosis import Diagnosis, Intervention
from trtllm_kvmap.evaluate.diagnosis.extrapolation import by_length, kl_divergence
from trtllm_kvmap.evaluate.diagnosis.interventions import (
    CONTROLS,
    Region,
    go_on,
    mapped_entries,
    regions,
    replaced,
)
from trtllm_kvmap.evaluate.diagnosis.token_error import TokenErrors
from trtllm_kvmap.evaluate.diagnosis.token_kinds import PARTS, kinds_of, parts_of
from trtllm_kvmap.evaluate.kv_error import KvError
from trtllm_kvmap.evaluate.probe import Ready, ask
from trtllm_kvmap.evaluate.provenance import name_of, provenance
from trtllm_kvmap.evaluate.reading import Reading, read_item
from trtllm_kvmap.evaluate.run import DRAWING_SEED, EvaluationConfig
from trtllm_kvmap.evaluate.score import attention_cosines
from trtllm_kvmap.evaluate.summary import mean_cosines
from trtllm_kvmap.evaluate.tasks.config import TaskConfig
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.inject.hf_cache import HfCache, view_pool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import HandoffPlan, plan_handoff


def diagnose(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    items: Sequence[Item],
    config: EvaluationConfig,
    longer: Mapping[int, Sequence[Item]] | None = None,
    on_item: Callable[[int, int], None] | None = None,
    task: TaskConfig | None = None,
) -> Diagnosis:
    """Where the divergence of ``kvmap`` on ``items`` lives.

    Of ``config`` are read first_tokens, repair_window, resamples, metric, length_normalised and
    backend. ``longer`` gives further items by the length of their contexts in tokens, each of which
    becomes a row of ``lengths``. ``on_item(done, total)`` counts ``items``. ``task`` is what named
    the items, for the diagnosis to say.

    Raises InputError for no items or contexts of which nothing is mapped, MismatchError for other
    models than the map's.
    """
    if not items:
        raise InputError("There are no items to diagnose; give at least one.")
    bridge = KvBridge(kvmap, source=source, target=target, backend=config.backend)
    run = _Run(bridge, items, config)
    for index, item in enumerate(items):
        run.add(item)
        if on_item is not None:
            on_item(index + 1, len(items))
    return run.diagnosis(by_length(bridge, longer or {}, config), asked(items, task))


class _Run:
    """Sums over items: of divergence, for every intervention that any of them allows."""

    def __init__(self, bridge: KvBridge, items: Sequence[Item], config: EvaluationConfig) -> None:
        self.bridge, self.config, self.count = bridge, config, len(items)
        target = bridge.target
        kinds = {kind for item in items for kind in kinds_of(target.tokenizer, item.context)}
        places = [f"{i + 1}/{PARTS}" for i in range(PARTS)]
        self.regions = list(regions(target.spec, places, sorted(kinds)))
        self.mapped: list[float] = []
        self.asked: list[int] = []
        self.sums: dict[tuple[str, str], list[float]] = {}
        self.replaced: set[tuple[str, str]] = set()  # in at least one item
        self.refused: dict[str, str] = {}
        self.tokens = TokenErrors(target)
        self.kv_error = KvError(target.spec.num_layers, target.spec.rope)
        self.cosines: list[np.ndarray] = []

    def add(self, item: Item) -> None:
        source, target = self.bridge.source, self.bridge.target
        assert isinstance(source, LoadedModel)  # diagnose was given one
        reading = read_item(source, target, item, (), rollout_steps=1)
        plan = plan_handoff(
            len(item.context),
            first_tokens=self.config.first_tokens,
            repair_window=self.config.repair_window,
        )
        if not plan.mapped:
            raise InputError(
                f"Of a context of {len(item.context)} tokens the target computes all itself; give "
                f"longer contexts, or a smaller repair_window."
            )
        entries = mapped_entries(self.bridge, reading, plan)
        ready = go_on(reading, plan, entries)
        answers = ask(ready, reading.script.tree)
        self.mapped.append(kl_divergence(answers.log_probs, reading.answers.log_probs))
        self.asked.append(len(answers.log_probs))
        self.cosines.append(attention_cosines(answers, reading.answers))
        self._count_errors(ready, reading, plan)
        kinds = kinds_of(target.tokenizer, item.context)
        groups = {"position": parts_of(plan.mapped), "kind": kinds}
        for region in self.regions:
            tokens = None if region.kind is None else groups[region.group].get(region.kind, [])
            self._ask(region.group, region.name, reading, plan, entries, region, tokens)
        for name, spoil in CONTROLS.items():
            try:
                spoilt = spoil(self.bridge, reading, plan, entries)
            except Refused as reason:
                self.refused[name] = str(reason)
                continue
            self._record("control", name, reading, plan, spoilt)

    def diagnosis(self, lengths: Any, said: dict[str, Any]) -> Diagnosis:
        """``said`` is what was asked, see asked.asked."""
        counts = draw(self.count, self.config.resamples, DRAWING_SEED)
        asked, mapped = counts @ np.array(self.asked), counts @ np.array(self.mapped)
        described = {(r.group, r.name): r for r in self.regions}
        rows = []
        for (group, name), sums in self.sums.items():
            region, total = described.get((group, name)), counts @ np.array(sums)
            if region and (group, name) not in self.replaced:
                continue  # no context has such a token among the mapped ones
            with np.errstate(divide="ignore", invalid="ignore"):
                removed = 1 - total / mapped
            rows.append(
                Intervention(
                    group=group,
                    name=name,
                    field=_only(region.fields) if region else None,
                    layer=_only(region.layers) if region and group in ("layer", "head") else None,
                    head=_only(region.heads) if region and group == "head" else None,
                    divergence=figure(total / asked).to_json(),
                    removed=figure(removed).to_json(),
                )
            )
        return Diagnosis(
            config={
                "source": self.bridge.source.name,
                "target": self.bridge.target.name,
                "S": self.config.first_tokens,
                "N": self.config.repair_window,
                "metric": self.config.metric,
                **said,
                "versions": versions(),
                "scope": self.bridge.kvmap.scope,
                "map": name_of(**provenance(self.bridge.kvmap)),
            },
            divergence=figure(mapped / asked).to_json(),
            interventions=tuple(rows),
            kv_error=self.kv_error.to_json(),
            attention_cosine=mean_cosines(self.cosines),
            tokens=tuple(self.tokens.rows()),
            lengths=tuple(lengths),
            refused=self.refused,
        )

    def _count_errors(self, ready: Ready, reading: Reading, plan: HandoffPlan) -> None:
        ours, theirs = view_pool(ready.cache), view_pool(reading.target.cache)
        length = self.bridge.target.rope_length(plan.num_tokens)
        self.kv_error.add(ours, theirs, plan.mapped, length)
        self.tokens.add(ours, theirs, plan.mapped, length, reading.item.context)

    def _ask(
        self,
        group: str,
        name: str,
        reading: Reading,
        plan: HandoffPlan,
        entries: HfCache,
        region: Region,
        tokens: Sequence[int] | None,
    ) -> None:
        if tokens is not None:
            tokens = [token for token in tokens if token in plan.mapped]
            if not tokens:  # nothing to replace here: the mapped cache as it is
                self.sums.setdefault((group, name), []).append(self.mapped[-1])
                return
        self.replaced.add((group, name))
        self._record(group, name, reading, plan, replaced(reading, plan, entries, region, tokens))

    def _record(
        self, group: str, name: str, reading: Reading, plan: HandoffPlan, entries: HfCache
    ) -> None:
        answers = ask(go_on(reading, plan, entries), reading.script.tree)
        self.sums.setdefault((group, name), []).append(
            kl_divergence(answers.log_probs, reading.answers.log_probs)
        )


def _only(names: Sequence[Any]) -> Any:
    return names[0] if len(names) == 1 else None
