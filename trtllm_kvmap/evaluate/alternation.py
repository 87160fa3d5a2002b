"""Multi-turn conversations in which two models take turns, as in the CoQA experiment of the ridge
mapper's authors (arXiv 2608.03893): does the drift grow from turn to turn?

Every arm reads the same tokens: after each turn the right answer, not the model's own, joins the
conversation, so that turns can be compared. A conversation is one decode.session.session.Session:
a model that comes back keeps what it had read, and only what it missed is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.bootstrap import draw, figure
from trtllm_kvmap.evaluate.run import DRAWING_SEED
from trtllm_kvmap.evaluate.tasks.conversations import Conversation
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.models import LoadedModel

FigureJson = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn over all conversations that have it. ``answered_by`` is the model whose turn it is
    when they alternate. Losses are nats per token of the right answer, ``exact`` the share of turns
    whose greedy answer is the right one; ``native`` is the same model that has read everything
    itself, ``source`` and ``target`` the two models alone. ``gap`` is alternating's loss minus
    native's, paired.
    """

    turn: int
    answered_by: str
    conversations: int
    nll: FigureJson
    native_nll: FigureJson
    source_nll: FigureJson
    target_nll: FigureJson
    gap: FigureJson
    exact: float
    native_exact: float
    mapped_tokens: float


@dataclass(frozen=True, slots=True)
class Alternation:
    """``turns`` in order; ``drift`` by the name of the model that answers: how much ``gap`` grows
    from one turn to the next, least squares over turns, nats per turn (None: fewer than two turns).
    """

    config: dict[str, Any]
    turns: tuple[TurnRow, ...]
    drift: dict[str, FigureJson]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def alternate(
    there: KvBridge,
    back: KvBridge,
    talks: Sequence[Conversation],
    *,
    first_tokens: int = 1,
    repair_window: int = 32,
    resamples: int = 2000,
    on_talk: Callable[[int, int], None] | None = None,
) -> Alternation:
    """``there`` leads from the model that answers turns 1, 3, ... to the one that answers turns 2,
    4, ...; ``back`` leads back. Raises InputError for bridges that are not each other's way back,
    or conversations that are too long for a model.
    """
    if there.source is not back.target or there.target is not back.source:
        raise InputError("The second bridge must lead back: from the first's target to its source.")
    if not talks:
        raise InputError("There are no conversations; give at least one.")
    source, target = there.source, there.target
    assert isinstance(source, LoadedModel)  # it is the target of the way back
    scored: list[dict[str, list[_Answer]]] = []
    for index, talk in enumerate(talks):
        models = {"source": source, "target": target}
        alone = {name: _alone(model, talk) for name, model in models.items()}
        session = Session(models, [there, back])
        both = _alternating(session, talk, first_tokens, repair_window)
        scored.append({**alone, "alternating": both})
        if on_talk is not None:
            on_talk(index + 1, len(talks))
    counts = draw(len(talks), resamples, DRAWING_SEED)
    return Alternation(
        config={
            "source": source.name,
            "target": target.name,
            "S": first_tokens,
            "N": repair_window,
            "conversations": len(talks),
        },
        turns=tuple(
            _row(turn, scored, counts) for turn in range(max(len(talk.turns) for talk in talks))
        ),
        drift={name: _drift(name, scored, counts) for name in ("source", "target")},
    )


def table(alternation: Alternation) -> Table:
    """One turn a row."""
    shown = Table(box=None, pad_edge=False)
    columns = ("turn", "answers", "NLL", "native", "gap", "exact", "native", "mapped tokens")
    for column in columns:
        shown.add_column(Text(column), justify="right")
    for row in alternation.turns:
        gap = row.gap
        interval = "" if gap["low"] is None else f" [{gap['low']:.3f} {gap['high']:.3f}]"
        shown.add_row(
            str(row.turn),
            row.answered_by,
            f"{row.nll['value']:.3f}",
            f"{row.native_nll['value']:.3f}",
            Text(f"{gap['value']:.3f}{interval}"),
            f"{row.exact:.2f}",
            f"{row.native_exact:.2f}",
            f"{row.mapped_tokens:.0f}",
        )
    return shown


@dataclass(frozen=True, slots=True)
class _Answer:
    """One turn: nats over ``tokens`` of the right answer, whether the greedy one is right, and how
    many entries of the answering model's cache are mapped.
    """

    nll: float
    tokens: int
    exact: bool
    mapped: int = 0


def _alone(model: LoadedModel, talk: Conversation) -> list[_Answer]:
    session = Session({"alone": model}, [])
    session.add(talk.opening)
    return [_turn(session, turn.asked, turn.answer) for turn in talk.turns]


def _alternating(
    session: Session, talk: Conversation, first_tokens: int, repair_window: int
) -> list[_Answer]:
    names = list(session.models)
    session.add(talk.opening)
    answers = []
    for index, turn in enumerate(talk.turns):
        if index:
            session.read()  # the last answer, which the model that goes has not read yet
            session.switch(names[index % 2], first_tokens=first_tokens, repair_window=repair_window)
        answers.append(_turn(session, turn.asked, turn.answer))
    return answers


def _turn(session: Session, asked: Sequence[int], answer: Sequence[int]) -> _Answer:
    """Ask the active model, score the right answer, and let the conversation go on with it."""
    session.add(asked)
    session.read()
    model, held = session.models[session.active], session.held[session.active]
    assert held.logits is not None  # just read
    said = generate(model, fork(held.cache), held.logits, len(answer))
    after = held.logits.reshape(1, -1)
    if len(answer) > 1:
        read = prefill(model, answer[:-1], fork(held.cache))
        after = torch.cat([after, read.logits])
    chosen = torch.log_softmax(after.double(), dim=-1)[range(len(answer)), list(answer)]
    session.add(answer)
    return _Answer(-float(chosen.sum()), len(answer), said == list(answer), held.mapped_tokens)


def _row(turn: int, scored: list[dict[str, list[_Answer]]], counts: np.ndarray) -> TurnRow:
    answers = "source" if turn % 2 == 0 else "target"
    has = np.array([len(each[answers]) > turn for each in scored])
    held = [each for each in scored if len(each[answers]) > turn]

    def mean(arm: str) -> np.ndarray:
        at = [each[arm][turn] for each in held]
        total, tokens = (np.array([getattr(a, n) for a in at]) for n in ("nll", "tokens"))
        with np.errstate(divide="ignore", invalid="ignore"):
            means: np.ndarray = (counts[:, has] @ total) / (counts[:, has] @ tokens)
        return means

    both = mean("alternating")
    return TurnRow(
        turn=turn + 1,
        answered_by=answers,
        conversations=len(held),
        nll=figure(both).to_json(),
        native_nll=figure(mean(answers)).to_json(),
        source_nll=figure(mean("source")).to_json(),
        target_nll=figure(mean("target")).to_json(),
        gap=figure(both - mean(answers)).to_json(),
        exact=float(np.mean([each["alternating"][turn].exact for each in held])),
        native_exact=float(np.mean([each[answers][turn].exact for each in held])),
        mapped_tokens=float(np.mean([each["alternating"][turn].mapped for each in held])),
    )


def _drift(name: str, scored: list[dict[str, list[_Answer]]], counts: np.ndarray) -> FigureJson:
    """The slope of the gap over the turns that ``name`` answers, in every draw."""
    points = [
        (row, turn, both.nll / both.tokens - alone.nll / alone.tokens)
        for row, each in enumerate(scored)
        for turn, (both, alone) in enumerate(zip(each["alternating"], each[name], strict=True))
        if (turn % 2 == 1) == (name == "target")
    ]
    rows, turns, gaps = (np.array(column) for column in zip(*points, strict=True))
    weight = counts[:, rows].astype(np.float64)
    total = weight.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        x, y = (weight @ turns) / total, (weight @ gaps) / total
        spread = (weight @ (turns**2)) / total - x**2
        slope = ((weight @ (turns * gaps)) / total - x * y) / np.where(
            spread > 1e-9, spread, np.nan
        )
    return figure(slope).to_json()
