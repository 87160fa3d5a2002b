"""Whole answers, timed: each model alone, and the target on a mapped cache, with and without drafts
of the source. All ways take turns in one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.decode.speculation.speculate import Speculation, speculate
from trtllm_kvmap.evaluate.run import EvaluationConfig
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.recipes.outcome import Row
from trtllm_kvmap.recipes.steps import Progress, ratio_figure
from trtllm_kvmap.spec.plan import plan_handoff

Prompt = tuple[int, ...]


class Answer(NamedTuple):
    """Seconds to the first token and to the last; ``drafted`` where the source drafted."""

    first: float
    whole: float
    drafted: Speculation | None = None


Times = dict[str, list[list[Answer]]]  # way: prompts: rounds


@dataclass(frozen=True, slots=True)
class Answerer:
    bridge: KvBridge
    source: LoadedModel
    judged: EvaluationConfig
    draft: DraftLength
    temperature: float
    new_tokens: int

    def take_turns(self, prompts: Sequence[Prompt], rounds: int, on_progress: Progress) -> Times:
        ways: dict[str, Callable[[Prompt], Answer]] = {
            "native target": lambda ids: self.native(self.bridge.target, ids),
            "native source": lambda ids: self.native(self.source, ids),
            "mapped": lambda ids: self.mapped(ids, drafting=False),
            "mapped, speculating": lambda ids: self.mapped(ids, drafting=True),
        }
        times: Times = {name: [] for name in ways}
        for number, ids in enumerate(prompts):
            for each in times.values():
                each.append([])
            for _ in range(rounds):
                for name, way in ways.items():
                    times[name][-1].append(way(ids))
            on_progress("answer", number + 1, len(prompts))
        return times

    def native(self, loaded: LoadedModel, ids: Prompt) -> Answer:
        began = time.perf_counter()
        read = prefill(loaded, ids, logits_to_keep=1)
        first = time.perf_counter() - began
        generate(
            loaded,
            read.cache,
            read.logits[-1],
            self.new_tokens,
            temperature=self.temperature,
            generator=torch.Generator().manual_seed(0),
        )
        return Answer(first, time.perf_counter() - began)

    def mapped(self, ids: Prompt, *, drafting: bool) -> Answer:
        """The source reads, the map and the repair follow, and the target answers."""
        target, judged = self.bridge.target, self.judged
        plan = plan_handoff(
            len(ids), first_tokens=judged.first_tokens, repair_window=judged.repair_window
        )
        draws = torch.Generator().manual_seed(0)
        began, drafted = time.perf_counter(), None
        read = prefill(self.source, ids, logits_to_keep=1)
        handoff = self.bridge.hand_over(read.cache, ids, plan)
        first = time.perf_counter() - began
        if drafting:
            drafted = speculate(
                self.source,
                target,
                read.cache,
                handoff.cache,
                handoff.logits,
                self.new_tokens,
                temperature=self.temperature,
                generator=draws,
                draft_length=self.draft,
            )
        else:
            generate(
                target,
                handoff.cache,
                handoff.logits,
                self.new_tokens,
                temperature=self.temperature,
                generator=draws,
            )
        return Answer(first, time.perf_counter() - began, drafted)


def over_native(times: Times) -> list[Row]:
    """Each way's time over the native target's: medians of turns, added up over prompts."""
    medians = {
        name: [
            [median(getattr(turn, part) for turn in turns) for turns in prompts]
            for part in ("first", "whole")
        ]
        for name, prompts in times.items()
    }
    base = medians["native target"]
    return [
        {
            "way": name,
            "first token": ratio_figure(first, base[0]),
            "whole answer": ratio_figure(whole, base[1]),
        }
        for name, (first, whole) in medians.items()
    ]


def drafts_row(times: Times) -> Row:
    """What became of the drafts, over all prompts."""
    found = [
        turn.drafted for turns in times["mapped, speculating"] for turn in turns[:1] if turn.drafted
    ]
    proposed, accepted, steps = (
        sum(getattr(each, name) for each in found) for name in ("proposed", "accepted", "row_steps")
    )
    emitted = sum(len(row) - 1 for each in found for row in each.rows)
    return {
        "proposed": proposed,
        "acceptance rate": accepted / max(proposed, 1),
        "acceptance length": emitted / max(steps, 1),
        "verifier steps": steps,
    }
