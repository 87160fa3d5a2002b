"""The demo at a small size: what it calibrates on and by, what it writes, what it tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_kvmap import demo
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.moments import MomentSet
from trtllm_kvmap.calibrate.text import text_digest
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.tasks.items import Item, Question
from trtllm_kvmap.fit.grid import FitGrid
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder

PAIR = "tiny-s-to-tiny-m"
Stages = dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[demo.PairDemo, Path, Stages]:
    """One pair at a small size: the result, its folder, and the last progress of each stage."""
    out = tmp_path_factory.mktemp("demo")
    stages: Stages = {}
    small = {
        "CALIBRATION_ITEMS": 8,
        "SELECTION_ITEMS": 2,
        "REPORT_ITEMS": 6,
        "GRIDS": (FitGrid(scope=("slice",), n=(4, 8), ridge=(1e-5,), fields="both"),),
        "measure_latency": lambda *_: None,  # has tests of its own, and takes longest
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(demo, name, value)
        made = demo.run_pair(
            "tiny-s", "tiny-m", out, lambda name, done, of: stages.__setitem__(name, (done, of))
        )
    return made, out / PAIR, stages


def test_rows_are_weighed_by_what_the_target_looks_at_when_it_is_asked(
    ran: tuple[demo.PairDemo, Path, Stages],
) -> None:
    moments = MomentSet.load(ran[1] / f"{PAIR}.moments.safetensors")
    assert moments.record["config"]["weighting"] == "attention"
    assert moments.record["config"]["joint"]
    target = load_model(model_folder("tiny-m"))
    items = demo.tiny_items(target, 8, seed=1)
    contexts = [item.context for item in items]
    said = [
        [token for q in item.questions for token in [*q.stem, *q.choices[q.label]]]
        for item in items
    ]
    assert moments.record["text"] == [text_digest(contexts), text_digest(said)]
    # No document that calibrates or chooses is judged on.
    sets = [{item.digest for item in demo.tiny_items(target, 20, seed)} for seed in (1, 2, 3)]
    assert len(set.union(*sets)) == 60


def test_the_map_is_chosen_and_judged_on_documents_of_their_own(
    ran: tuple[demo.PairDemo, Path, Stages],
) -> None:
    made, folder, stages = ran
    assert stages == {
        f"{PAIR}: calibrate": (8, 8),
        f"{PAIR}: choose": (2, 2),
        f"{PAIR}: evaluate": (6, 6),
    }
    names = "kvmap.safetensors", "moments.safetensors"
    assert [file.name for file in made.files] == [
        "report.html",
        "report.json",
        "report.md",
        *(f"{PAIR}.{name}" for name in names),
    ]
    kvmap = KvMap.load(folder / f"{PAIR}.kvmap.safetensors")  # it carries its evidence
    target = load_model(model_folder("tiny-m"))
    chose = [item.digest for item in demo.tiny_items(target, 2, seed=2)]
    assert kvmap.fitted["selected_on"] == chose
    report = Report.load(folder / "report.json")
    assert report.gap_recovered == made.report.gap_recovered
    assert (report.config["S"], report.config["N"], report.config["num_items"]) == (4, 32, 6)
    judged = demo.tiny_items(target, 6, seed=3)
    assert report.contexts["tokens"] == [len(item.context) for item in judged]


def test_it_tells_what_each_model_answers(ran: tuple[demo.PairDemo, Path, Stages]) -> None:
    told = ran[0].told
    target = load_model(model_folder("tiny-m"))
    (item,) = demo.tiny_items(target, 1, seed=3)
    assert [each.right for each in told] == [
        demo.in_words(target, q.choices[q.label]) for q in item.questions
    ]
    assert all(each.question.startswith(("so first after", "so second after")) for each in told)
    assert all(each.target == each.right for each in told)  # tiny-m knows them all


def test_what_is_asked_is_the_questions_with_their_right_answers() -> None:
    questions = Question((1, 2), ((3,), (4, 5)), 1), Question((6,), ((7,), (8,)), 0)
    assert demo.asked(Item((9, 9), questions)) == [[1, 2, 4, 5, 6, 7]]


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="cannot be written"):
        demo.run_demo(tmp_path / "file", lambda stage, done, total: pytest.fail(stage))
