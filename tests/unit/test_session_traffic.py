"""A conversation that changes models lets background calibration have what was written with
consent, and is never disturbed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade_maps import copy_map

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.calibrate.traffic import TrafficConfig, TrafficMoments
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.session import session as session_module
from trtllm_kvmap.decode.session.session import Session
from trtllm_kvmap.models import LoadedModel

JOINT = CalibrationConfig(joint=True)
COUNT_ALL = TrafficConfig(consent=True, min_documents=2, held_out_every=10**9)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 60, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> tuple[LoadedModel, LoadedModel]:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2)


@pytest.fixture
def traffic(pair: tuple[LoadedModel, LoadedModel]) -> Iterator[TrafficMoments]:
    with TrafficMoments(*pair, COUNT_ALL, JOINT) as counting:
        yield counting


def session_of(traffic: TrafficMoments | None, *models: LoadedModel) -> Session:
    bridges = [
        KvBridge(copy_map(a, b), source=a, target=b) for a in models for b in models if a is not b
    ]
    return Session({"small": models[0], "large": models[1]}, bridges, traffic=traffic)


def handed_over(session: Session, *added: tuple[list[int], bool]) -> list[int]:
    for ids, consent in added:
        session.add(ids, consent=consent)
    session.switch("large", repair_window=4)
    return list(session.token_ids)


def test_what_was_handed_over_with_consent_is_counted(
    pair: tuple[LoadedModel, LoadedModel], traffic: TrafficMoments, tmp_path: Path
) -> None:
    conversations = []
    for seed in range(3):
        session = session_of(traffic, *pair)
        session.add(tokens(30, seed), consent=True)
        session.generate(3)  # a reply to what may be counted may be counted too
        conversations.append(handed_over(session, (tokens(9, seed + 10), True)))
        traffic.drain()
    assert [len(ids) for ids in conversations] == [42] * 3
    wanted = calibrate(*pair, conversations, JOINT, tmp_path / "moments")
    for mine, theirs in zip(traffic.moments().parts, wanted.parts, strict=True):
        assert mine.moments.count == theirs.moments.count
        for a, b in zip(mine.moments.tensors(), theirs.moments.tensors(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-9)


def test_nothing_is_counted_from_the_first_text_without_consent_on(
    pair: tuple[LoadedModel, LoadedModel],
    traffic: TrafficMoments,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered: list[list[int]] = []
    monkeypatch.setattr(traffic, "offer", lambda ids, name: offered.append(list(ids)))
    agreed, private, after = tokens(20, 1), tokens(20, 2), tokens(20, 3)
    handed_over(session_of(traffic, *pair), (private, False))
    handed_over(session_of(traffic, *pair), (private, False), (after, True))
    handed_over(session_of(traffic, *pair), (agreed, True), (private, False), (after, True))
    handed_over(session_of(traffic, *pair), (agreed, True), (private, False), (after, False))
    session = session_of(traffic, *pair)
    session.add(private)  # nobody was asked
    session.switch("large", repair_window=4)
    assert offered == [[], [], agreed, agreed, []]


def test_a_conversation_is_counted_once_and_only_on_the_way_there(
    pair: tuple[LoadedModel, LoadedModel], traffic: TrafficMoments
) -> None:
    session = session_of(traffic, *pair)
    for number in range(2):
        handed_over(session, (tokens(20, number), True))
        traffic.drain()
        assert traffic.documents == 1
        session.switch("small")
        traffic.drain()
        assert traffic.documents == 1


def test_a_conversation_of_other_models_is_not_counted(
    pair: tuple[LoadedModel, LoadedModel], random_model: Callable, traffic: TrafficMoments
) -> None:
    other = random_model("qwen3", seed=3)
    for models in ((pair[0], other), (other, pair[1])):
        handed_over(session_of(traffic, *models), (tokens(20, 1), True))
    traffic.drain()
    assert traffic.documents == 0


def test_counting_stands_still_while_a_conversation_works(
    pair: tuple[LoadedModel, LoadedModel],
    traffic: TrafficMoments,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads for the conversation finds the background asked to be quiet."""
    answers: list[int] = []
    for name in ("prefill", "carry_over", "generate", "upgrade_chunk"):
        usual = getattr(session_module, name)

        def noted(*args: Any, usual: Callable = usual, **kwargs: Any) -> Any:
            answers.append(len(traffic._quiet._answering))
            return usual(*args, **kwargs)

        monkeypatch.setattr(session_module, name, noted)

    class Noted(session_module.Mirror):
        def follow(self, *given: Any) -> None:
            answers.append(len(traffic._quiet._answering))
            super().follow(*given)

    monkeypatch.setattr(session_module, "Mirror", Noted)
    session = session_of(traffic, *pair)
    session.add(tokens(20, 0))
    for work in (
        session.read,
        lambda: session.mirror("large"),
        lambda: session.switch("large", repair_window=4),
        lambda: session.generate(2),
        session.upgrade,
    ):
        answers.clear()
        work()
        assert answers
        assert set(answers) == {1}
        assert traffic._quiet._answering == []


def test_a_mistake_lets_counting_go_on(
    pair: tuple[LoadedModel, LoadedModel], traffic: TrafficMoments
) -> None:
    with pytest.raises(Exception, match="empty"):
        session_of(traffic, *pair).generate(3)
    assert traffic._quiet._answering == []
