"""Recipe configs are read strictly, texts share nothing, and own models need own text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from trtllm_kvmap.errors import InputError
from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.recipes.pair import OwnModels, require_disjoint
from trtllm_kvmap.recipes.run import RECIPES, config_of, run_recipe
from trtllm_kvmap.recipes.strict import build, merged, read_yaml


@dataclass(frozen=True)
class Inner:
    name: str
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outer:
    count: int
    inner: Inner
    pair: tuple[str, int]
    kind: Literal["a", "b"] = "a"
    quick: bool = False


GOOD = {"count": 3, "inner": {"name": "x", "rates": [1, 0.5]}, "pair": ["y", 2]}


def test_a_mapping_becomes_the_dataclass_it_describes() -> None:
    assert build(Outer, GOOD) == Outer(3, Inner("x", (1.0, 0.5)), ("y", 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cuont": 3}, "unknown key 'cuont'"),
        ({"count": 3.0}, "count must be of type int"),
        ({"count": True}, "count must be of type int"),
        ({"count": "3"}, "count must be of type int"),
        ({"inner": {"rates": []}}, "inner needs the key 'name'"),
        ({"inner": {"name": "x", "rates": ["1e-3"]}}, "write 1.0e-3"),
        ({"inner": {"name": "x", "rates": 1.0}}, "rates must be a list"),
        ({"inner": "x"}, "inner must hold keys"),
        ({"pair": ["y"]}, "list of 2"),
        ({"kind": "c"}, "one of ('a', 'b')"),
        ({"quick": 1}, "quick must be of type bool"),
    ],
)
def test_a_mapping_of_another_shape_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        build(Outer, GOOD | change)
    assert said in str(refused.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InputError, match="needs the key 'pair'"):
        build(Outer, {key: value for key, value in GOOD.items() if key != "pair"})


def test_values_are_put_over_others_key_by_key_and_neither_is_changed() -> None:
    base, over = {"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"y": 3}, "b": [2]}
    assert merged(base, over) == {"a": {"x": 1, "y": 3}, "b": [2]}
    assert base == {"a": {"x": 1, "y": 2}, "b": [1]}


@pytest.mark.parametrize("value", [3, None, [1]])
def test_a_value_is_not_lost_under_a_mapping(value: object) -> None:
    with pytest.raises(InputError, match=r"^a must hold keys with values, got "):
        merged({"a": value}, {"a": {"x": 1}})


@pytest.mark.parametrize(
    ("content", "said"), [("- 1\n", r"got \[1\]"), ("a: [1\n", ""), ("", "got nothing")]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"keys with values.*{said}"):
        read_yaml(path)
    with pytest.raises(InputError):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_config_is_whole_and_an_unknown_key_is_refused(name: str) -> None:
    assert isinstance(config_of(name), RECIPES[name][0])
    with pytest.raises(InputError, match="unknown key 'sauce'"):
        config_of(name, {"sauce": "tiny-s"})
    with pytest.raises(InputError, match="report has the unknown key"):
        config_of(name, {"report": {"items": 3}})


def test_an_unknown_recipe_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ridge-k"):
        config_of("ridge")


def test_text_that_was_seen_is_refused() -> None:
    seen = [tuple(range(100))]
    require_disjoint(seen, [Item(tuple(range(200, 300)), continuation=(1,))], "fits and judges")
    half = tuple(range(60)) + tuple(range(500, 530))  # 29 of 59 runs are known
    require_disjoint(seen, [Item(half, continuation=(1,))], "fits and judges")
    copied = tuple(range(20, 90)) + tuple(range(500, 530))  # 39 of 69 runs are known
    with pytest.raises(InputError, match="fits and judges share a document"):
        require_disjoint(seen, [Item(copied, continuation=(1,))], "fits and judges")
    short = Item(tuple(range(10)), continuation=(1,))
    with pytest.raises(InputError):
        require_disjoint([tuple(range(10))], [short], "fits and judges")


def test_a_recipe_whose_texts_are_the_same_does_not_run(tmp_path: Path) -> None:
    over = {
        "selection": {"seed": 3, "num_items": 1, "context_tokens": 256},
        "report": {"seed": 3, "num_items": 1, "context_tokens": 256},
        "fit": {"num_items": 2},
    }
    with pytest.raises(InputError, match="share a document"):
        run_recipe("ridge-k", tmp_path / "out", over=over)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(InputError, match="cannot be written"):
        run_recipe("ridge-k", tmp_path / "out", over={"selection": {"num_items": 1}})


def test_own_models_are_given_with_own_text() -> None:
    with pytest.raises(InputError, match="--source, --target, --text"):
        OwnModels(source="a", target="b")
    own = OwnModels("a", "b", Path("t.txt"), "text", Path("d.txt"))
    config = own.put_into(config_of("ridge-k"))
    assert (config.source, config.target, config.judged.metric) == ("a", "b", "nll")
    assert config.report.skip == config.selection.num_items
    assert (config.report.task, config.report.data) == ("text", "d.txt")
    assert OwnModels().put_into(config_of("ridge-k")) == config_of("ridge-k")
