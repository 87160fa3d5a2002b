"""Pooled ridge over several pairs, an MLP where ridge fails, and conversations that alternate.

Each pair has a map of its own, judged for itself: equal shapes promise nothing. The first pair then
takes turns in conversations, and what the map costs is told turn by turn, against the same
conversation that never changed models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session import Session
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.conversations import Conversation, read_conversations
from trtllm_kvmap.evaluate.tasks import TaskConfig
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.recipes.outcome import Judged, Outcome, Row
from trtllm_kvmap.recipes.pair import Pair, PairConfig, load_named
from trtllm_kvmap.recipes.steps import (
    RESAMPLES,
    Progress,
    chosen,
    judged_map,
    mean_figure,
    moments_of,
    said,
)
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.run import refine
from trtllm_kvmap.tiny import FAMILY


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PairConfig):
    """Beside source to target and back, each of ``more_targets`` is a pair with the source. A pair
    is failing when it retains less than ``failing_below`` of the accuracy above chance (without
    questions: when its perplexity is more than 1 / ``failing_below`` times the target's).
    """

    more_targets: tuple[str, ...]
    candidates: FitGrid
    failing_below: float
    mlp: RefineConfig
    mlp_documents: int
    conversations: TaskConfig

    def __post_init__(self) -> None:
        if self.mlp.term != "mlp":
            raise InputError(f"mlp needs the term mlp, got {self.mlp.term!r}.")
        if not 0 < self.failing_below <= 1:
            raise InputError(
                f"failing_below must lie above 0, at most 1; got {self.failing_below}."
            )


def run(config: Config, pair: Pair, on_progress: Progress) -> Outcome:
    pairs = [pair, replace(pair, source=pair.target, target=pair.source)]
    if config.source in FAMILY:  # text of your own is given for two models
        pairs += [replace(pair, target=load_named(name)) for name in config.more_targets]
    judged: dict[str, Judged] = {}
    directory: list[Row] = []
    for each in pairs:
        name = f"{each.source.name}-to-{each.target.name}".replace("/", "-")
        judged[name], row = one_pair(config, each, on_progress)
        directory.append({"pair": name, **row})
    maps = [found.kvmap for found in list(judged.values())[:2]]
    turns, drift = alternate(config, pair, maps, on_progress)
    first = next(iter(judged.values()))
    return Outcome(
        judged=judged,
        tables={
            "maps, one for each direction": directory,
            "loss of the right answer, turn by turn, nats": turns,
            "what a turn adds to the loss of mapping, nats": drift,
        },
        sentence=(
            f"{len(judged)} maps, the first recovers {said(first.report.gap_recovered)} of the "
            f"gap; over {len(turns)} alternating turns its loss drifts by "
            f"{said(drift[0]['drift'])} nats a turn"
        ),
    )


def one_pair(config: Config, pair: Pair, on_progress: Progress) -> tuple[Judged, Row]:
    """Pooled ridge; where that fails, the same map with an MLP, and the better of the two on the
    text that chooses is kept.
    """
    moments = moments_of(pair, on_progress)
    kvmap, _ = chosen(pair, moments, config.candidates.candidates(), config.judged, on_progress)
    judged = judged_map(pair, kvmap, config.judged, on_progress)
    row = {"ridge": judged.summary()["gap recovered"], "with MLP": None}
    if failing(judged, config.failing_below):
        refined = refine(
            kvmap,
            pair.source,
            pair.target,
            pair.documents[: config.mlp_documents],
            config.mlp,
            on_step=lambda done, total: on_progress(
                f"{pair.source.name} to {pair.target.name}: train an MLP", done, total
            ),
        )
        mended = judged_map(pair, refined, config.judged, on_progress)
        row["with MLP"] = mended.summary()["gap recovered"]
        # The scale was chosen on documents that trained nothing: 0 means that the MLP is not there.
        if refined.fitted["refined"]["scale"]:
            judged = mended
    return judged, {
        **judged.summary(),
        **row,
        "above chance": judged.report.retention_normalised,
        "k": kvmap.fitted["config"]["k"],
        "parameters": judged.kvmap.num_parameters,
    }


def failing(judged: Judged, below: float) -> bool:
    retained = judged.report.retention_normalised["value"]
    if retained is not None:
        return retained < below
    ratio = judged.report.perplexity_ratio["value"]
    return ratio is None or ratio > 1 / below


def alternate(
    config: Config, pair: Pair, maps: Sequence[KvMap], on_progress: Progress
) -> tuple[list[Row], list[Row]]:
    """Conversations in which the two models answer in turn, the source first, and the same ones
    with each model alone.
    """
    source, target = pair.source, pair.target
    bridges = [
        KvBridge(maps[0], source=source, target=target),
        KvBridge(maps[1], source=target, target=source),
    ]
    models = {"source": source, "target": target}
    talks = read_conversations(config.conversations, target.tokenizer)
    count = min((len(talk.turns) for talk in talks), default=0)
    if count < 4:
        raise InputError(
            f"Conversations of at least 4 turns are needed to see a drift; the shortest of "
            f"{len(talks)} has {count}. Give longer ones."
        )
    losses = []  # [talks][source, target, alternating][turns]
    for number, talk in enumerate(talks):
        losses.append(
            [losses_of(Session({name: models[name]}, []), talk, count, config) for name in models]
            + [losses_of(Session(models, bridges), talk, count, config)]
        )
        on_progress("converse", number + 1, len(talks))
    scores = np.array(losses)
    turns = [
        {
            "turn": turn + 1,
            "answers": ("source", "target")[turn % 2],
            "native source": mean_figure(scores[:, 0, turn]),
            "native target": mean_figure(scores[:, 1, turn]),
            "alternating": mean_figure(scores[:, 2, turn]),
        }
        for turn in range(count)
    ]
    return turns, [_drift(scores, place) for place in (1, 0)]


def losses_of(session: Session, talk: Conversation, count: int, config: Config) -> list[float]:
    """-log p of each right answer, mean over its tokens. A session of two models changes after each
    turn; every answer is then told as it should have been.
    """
    names, losses = list(session.models), []
    session.add(talk.opening)
    for number, turn in enumerate(talk.turns[:count]):
        session.add(turn.asked)
        wanted = names[number % len(names)]
        if wanted != session.active:
            session.switch(
                wanted,
                first_tokens=config.judged.first_tokens,
                repair_window=config.judged.repair_window,
            )
        else:
            session.read()
        losses.append(_loss(session.models[wanted], session, turn.answer))
        session.add(turn.answer)
    return losses


def _loss(loaded: LoadedModel, session: Session, answer: Sequence[int]) -> float:
    held = session.held[session.active]
    assert held.logits is not None  # it has just read or been handed the question
    rows = [held.logits.float()[None]]
    if len(answer) > 1:
        rows.append(prefill(loaded, answer[:-1], fork(held.cache)).logits)
    found = 0.0
    for row, token in zip((r for each in rows for r in each), answer, strict=True):
        found -= float(row.log_softmax(-1)[token])
    return found / len(answer)


def _drift(scores: np.ndarray, place: int) -> Row:
    """The slope, over the turns that one model answers, of its loss beyond its own alone."""
    which = np.arange(place, scores.shape[2], 2)
    excess = scores[:, 2, which] - scores[:, place, which]
    counts = draw(len(excess), RESAMPLES, 0)
    means = (counts @ excess) / len(excess)
    centred = which - which.mean()
    slopes = means @ centred / (centred**2).sum()
    return {
        "answers": ("source", "target")[place],
        "mean excess": mean_figure(excess.mean(axis=1)),
        "drift": figure(slopes).to_json(),
    }
