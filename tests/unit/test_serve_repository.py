"""Model repositories as text: whole or absent, for the pair that the map was fitted for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from evidence_case import vouched
from handmade_maps import random_map
from test_routing import SPEEDS, evidence
from typer.testing import CliRunner

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.decode.guard.guard import Guard
from trtllm_kvmap.decode.routing.speeds import Speeds
from trtllm_kvmap.errors import FormatError, InputError, KvMapError, MismatchError, UnprovenError
from trtllm_kvmap.inject import trtllm
from trtllm_kvmap.inject.connector.config import ConnectorConfig
from trtllm_kvmap.models import load_model
from trtllm_kvmap.serve.config_pbtxt import ModelConfig, TensorPort
from trtllm_kvmap.serve.repository import LANES, require_countable, write_repository
from trtllm_kvmap.serve.settings import ServeConfig


@pytest.fixture(scope="module")
def given(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict:
    source = model_folder("llama", layers=3, kv_heads=4, seed=1)
    target = model_folder("qwen3", head_dim=32)
    kvmap = tmp_path_factory.mktemp("map") / "s-to-t.kvmap.safetensors"
    vouched(random_map(load_model(source), load_model(target))).save(kvmap)
    return {"kvmap": kvmap, "source": str(source), "target": str(target)}


def parameters(text: str) -> dict[str, str]:
    """The parameters of a config.pbtxt, by a reader of its own."""
    found = re.findall(r'key: ("[^"]*") value \{ string_value: ("(?:[^"\\]|\\.)*") \}', text)
    return {json.loads(key): json.loads(value) for key, value in found}


def test_the_command_writes_the_hf_lane(given: dict, tmp_path: Path) -> None:
    out = tmp_path / "repository"
    arguments = ["triton", "--out", str(out), "--repair-window", "16", "--max-held-tokens", "9"]
    for name, value in given.items():
        arguments += [f"--{name}", str(value)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    models = ("kvmap_pipeline", "kvmap_whole", "source", "target")
    assert files == sorted(f"{m}/{f}" for m in models for f in ("config.pbtxt", "1/model.py"))
    assert parameters((out / "source/config.pbtxt").read_text()) == {
        "model": given["source"],
        "max_held_tokens": "9",
    }
    assert parameters((out / "target/config.pbtxt").read_text()) == {
        "model": given["target"],
        "kvmap": str(given["kvmap"]),
        "allow_unproven": "false",
        "traffic": "",
        "traffic_share": "0.1",
    }
    pipeline = parameters((out / "kvmap_pipeline/config.pbtxt").read_text())
    assert (pipeline["repair_window"], pipeline["mapper_id"]) == ("16", "s-to-t")
    assert pipeline["kvmap"] == str(given["kvmap"])
    assert parameters((out / "kvmap_whole/config.pbtxt").read_text()) == pipeline
    decoupled = [m for m in models if "decoupled" in (out / m / "config.pbtxt").read_text()]
    assert decoupled == ["kvmap_pipeline", "target"]
    for model in models:
        assert f'name: "{model}"\n' in (out / model / "config.pbtxt").read_text()
    assert not list(tmp_path.glob(".repository*")), "nothing is left beside it"


def test_traffic_is_counted_in_a_folder_of_the_servers_machine(
    given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ServeConfig(traffic="moments", traffic_share=0.25)
    write_repository(tmp_path / "r", **given, config=config)
    written = parameters((tmp_path / "r/target/config.pbtxt").read_text())
    assert (written["traffic"], written["traffic_share"]) == (str(tmp_path / "moments"), "0.25")
    assert not (tmp_path / "moments").exists(), "it is the server that counts"
    with pytest.raises(InputError, match="The lane trtllm counts no traffic"):
        write_repository(tmp_path / "t", **given, config=config, lane="trtllm")
    read = KvMap.load(given["kvmap"])
    for end in ("source", "target"):
        spec = getattr(read, end)
        rope = replace(spec.rope, kind="dynamic", original_length=32, factor=2.0)
        with pytest.raises(InputError, match="RoPE of the kind dynamic"):
            require_countable(replace(read, **{end: replace(spec, rope=rope)}), "hf")
    with pytest.raises(InputError, match="traffic_share must lie above 0"):
        ServeConfig(traffic_share=0)


def test_a_models_file_imports_what_exists(given: dict, tmp_path: Path) -> None:
    """triton_python_backend_utils is only there inside the server, so the names are looked up in
    the text of the modules.
    """
    write_repository(tmp_path / "r", **given, config=ServeConfig())
    for file in (tmp_path / "r").rglob("model.py"):
        (imported,) = (n for n in ast.walk(ast.parse(file.read_text())) if hasattr(n, "module"))
        package, _, name = imported.module.rpartition(".")
        text = (Path(import_module(package).__file__).parent / f"{name}.py").read_text()
        assert f"class {imported.names[0].name}" in text


def test_the_trtllm_lane_names_classes_and_settings_that_exist(given: dict, tmp_path: Path) -> None:
    """As text: TensorRT-LLM is not here. The connector's module is read, not imported, for that."""
    out = tmp_path / "r"
    config = ServeConfig(first_tokens=3, repair_window=16)
    write_repository(out, **given, config=config, lane="trtllm")
    assert "UNVERIFIED" in (out / "README.md").read_text().splitlines()[0]
    settings = ConnectorConfig.of(json.loads((out / "connector.json").read_text()))
    assert (settings.kvmap, settings.first_tokens) == (str(given["kvmap"]), 3)
    assert settings.repair_window == 16
    package = Path(trtllm.__file__).parent
    for model, half in (("source", "Export"), ("target", "Map")):
        arguments = json.loads((out / model / "1/model.yaml").read_text())
        assert arguments["model"] == given[model]
        connector = arguments["kv_connector_config"]
        module = package / f"{connector['connector_module'].rpartition('.')[2]}.py"
        exported = ast.literal_eval(module.read_text().rpartition("__all__ = ")[2])
        for role in ("scheduler", "worker"):
            name = connector[f"connector_{role}_class"]
            assert name == f"Kv{half}{role.capitalize()}"
            assert name in exported
        assert arguments["kv_cache_config"]["enable_block_reuse"]
        text = (out / model / "config.pbtxt").read_text()
        assert f'name: "{model}"\n' in text
        assert "max_batch_size" not in text, "upstream's model.py sets it"


def test_a_config_is_escaped_as_a_text_string() -> None:
    port = TensorPort("x", "TYPE_INT64", (2, -1), optional=True)
    odd = 'a "b" \\ c\nd é'
    text = ModelConfig("m", (port,), (), {"k": odd}, decoupled=True).render()
    assert "dims: [2, -1] optional: true" in text
    assert "decoupled: true" in text
    assert parameters(text) == {"k": odd}
    assert text.isascii()


def test_speeds_go_into_the_pipelines(given: dict, tmp_path: Path) -> None:
    """Only where they can be routed by: the map's report must vouch for hand-overs like these."""
    source, target = load_model(given["source"]), load_model(given["target"])
    path = tmp_path / "v.kvmap.safetensors"
    vouched(random_map(source, target), evidence()).save(path)
    SPEEDS.save(tmp_path / "speeds.json")
    out = tmp_path / "r"
    arguments = ["triton", "--out", str(out), "--speeds", str(tmp_path / "speeds.json")]
    for name, value in {**given, "kvmap": path}.items():
        arguments += [f"--{name}", str(value)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = sorted(path.parent.name for path in out.rglob("speeds.json"))
    assert found == ["kvmap_pipeline", "kvmap_whole"]
    assert Speeds.load(out / "kvmap_whole" / "speeds.json") == SPEEDS

    near = evidence(config=evidence()["config"] | {"N": 33})
    poor = evidence(gap_recovered={"value": 0.0, "low": -0.1, "high": 0.1})
    for name, known in (("near", near), ("poor", poor)):
        vouched(random_map(source, target), known).save(tmp_path / name)
    random_map(source, target).with_evidence(evidence()).save(tmp_path / "another's")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"lane": "trtllm"}, "routes no request"),
        ({"config": ServeConfig(repair_window=8)}, "window of 32 tokens.*hands over with 8"),
        ({"kvmap": tmp_path / "poor"}, "nowhere: its report does not show"),
        (
            {"kvmap": tmp_path / "another's", "allow_unproven": True},
            "nowhere: its evidence is of another map",
        ),
        ({"kvmap": tmp_path / "near"}, "nowhere: its report repairs 33 tokens, this host 32"),
    ]
    for changed, said in wrong:
        asked = {**given, "kvmap": path, "config": ServeConfig(), **changed}
        with pytest.raises(InputError, match=said):
            write_repository(tmp_path / "n", **asked, speeds=SPEEDS)
        assert not (tmp_path / "n").exists()


def test_a_guard_must_be_able_to_judge_what_is_served(given: dict, tmp_path: Path) -> None:
    """Else the server would take every hand-over back, or the map for unreadable."""
    bare = random_map(load_model(given["source"]), load_model(given["target"]))
    bare = vouched(bare)
    bare.with_guard(Guard((1.0, 0.0), 0.0, 1.0, {}).to_json()).save(tmp_path / "guarded")
    bare.with_guard({"weights": "none"}).save(tmp_path / "damaged")
    wrong: list[tuple[str, int, type[KvMapError], str]] = [
        ("guarded", 1, InputError, "at least 2 repaired tokens.*repairs 1.*--repair-window"),
        ("damaged", 8, FormatError, "guard in the map cannot be read"),
    ]
    for name, window, kind, said in wrong:
        asked = {**given, "kvmap": tmp_path / name, "config": ServeConfig(repair_window=window)}
        with pytest.raises(kind, match=said):
            write_repository(tmp_path / "n", **asked)
        assert not (tmp_path / "n").exists()
    asked = {**given, "kvmap": tmp_path / "guarded"}
    assert write_repository(tmp_path / "h", **asked, config=ServeConfig(repair_window=2))
    few = ServeConfig(repair_window=1)
    assert write_repository(tmp_path / "t", **asked, config=few, lane="trtllm"), "none judges there"


@pytest.mark.parametrize("lane", LANES)
def test_nothing_is_written_when_something_is_wrong(
    lane: str, given: dict, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    unproven = tmp_path / "unproven.kvmap.safetensors"
    random_map(load_model(given["source"]), load_model(given["target"])).save(unproven)
    other = str(model_folder("llama", layers=2, kv_heads=4, seed=1))
    words = str(model_folder("llama", layers=3, kv_heads=4, seed=1, words=["a", "<bos>", "<pad>"]))
    swapped = {"source": given["target"], "target": given["source"]}
    file = tmp_path / "file"
    file.write_text("")
    wrong: list[tuple[dict[str, Any], type[KvMapError], str]] = [
        ({"source": other}, MismatchError, "another source model: config differ"),
        ({"target": other}, MismatchError, "another target model"),
        ({"source": words}, MismatchError, "another source model: tokenizer differs"),
        ({"source": str(tmp_path / "none")}, InputError, "no such folder"),
        ({"kvmap": unproven}, UnprovenError, "no evidence"),
        ({"kvmap": tmp_path / "none"}, KvMapError, "no file"),
        (swapped, MismatchError, "Source and target look swapped"),
        ({"config": ServeConfig(traffic=str(file))}, InputError, "traffic .*needs a folder"),
        ({"config": ServeConfig(traffic=str(file / "in"))}, InputError, f"{file} is none"),
        ({"lane": "grpc"}, InputError, "no lane 'grpc'; there are hf"),
    ]
    for changed, kind, said in wrong:
        with pytest.raises(kind, match=said):
            write_repository(
                tmp_path / "r", **{**given, "config": ServeConfig(), "lane": lane, **changed}
            )
        assert not (tmp_path / "r").exists()


def test_a_folder_that_holds_something_is_left_alone(given: dict, tmp_path: Path) -> None:
    out = tmp_path / "r"
    out.mkdir()
    write_repository(out, **given, config=ServeConfig())
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="not an empty folder"):
        write_repository(out, **given, config=ServeConfig(repair_window=1))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    with pytest.raises(InputError, match="not an empty folder"):
        write_repository(out / "source/config.pbtxt", **given, config=ServeConfig())
