"""A pipeline's folder: whole or absent, and refused when anything of it is not as it was built."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_fake_builders import VERSIONS, FakeBuilders
from evidence_case import vouched
from handmade_maps import random_map

from trtllm_kvmap.artifact.container import read_digest
from trtllm_kvmap.engine.build import build_pipeline
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.manifest import (
    KVMAP,
    MAP_ENGINE,
    NAME,
    FileRecord,
    Manifest,
    read_manifest,
)
from trtllm_kvmap.errors import FormatError, InputError, MismatchError, UnprovenError
from trtllm_kvmap.models import load_model

CONFIG = PipelineConfig(max_tokens=256, max_draft_len=3)
FILES = [
    MAP_ENGINE,
    KVMAP,
    "source/config.json",
    "source/rank0.engine",
    "target/config.json",
    "target/rank0.engine",
]


@dataclass(frozen=True)
class Pair:
    source: Path
    target: Path
    kvmap: Path

    def build(self, out: Path, builders: FakeBuilders | None = None, **changes: object) -> Manifest:
        given = {"source": self.source, "target": self.target, "kvmap_path": self.kvmap, **changes}
        return build_pipeline(out=out, config=CONFIG, builders=builders or FakeBuilders(), **given)


@pytest.fixture(scope="module")
def pair(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    source, target = model_folder("qwen3", seed=1), model_folder("qwen3", layers=3, seed=2)
    kvmap = vouched(random_map(load_model(source), load_model(target)))
    path = tmp_path_factory.mktemp("map") / "pair.kvmap.safetensors"
    kvmap.save(path)
    return Pair(source, target, path)


@pytest.fixture
def built(pair: Pair, tmp_path: Path) -> Path:
    pair.build(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def test_what_was_built_is_read_back(pair: Pair, tmp_path: Path) -> None:
    builders = FakeBuilders()
    written = pair.build(tmp_path / "pipeline", builders)
    assert builders.built == ["source", "target", "map"]
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline"]
    manifest = read_manifest(tmp_path / "pipeline")
    assert manifest == written
    assert sorted(manifest.files) == FILES
    assert manifest.config == CONFIG
    assert manifest.kvmap_digest == read_digest(pair.kvmap)
    assert (manifest.tensorrt, manifest.device) == (VERSIONS.tensorrt, VERSIONS.device)
    assert manifest.source_fingerprint == load_model(pair.source).fingerprint
    assert manifest.target.num_layers == 3


@pytest.mark.parametrize("part", ["source", "target", "map"])
def test_what_cannot_be_built_leaves_nothing(pair: Pair, tmp_path: Path, part: str) -> None:
    with pytest.raises(RuntimeError, match=f"{part} cannot be built"):
        pair.build(tmp_path / "pipeline", FakeBuilders(fail_at=part))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_written_to(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists"):
        pair.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_models_the_map_was_not_fitted_for(
    pair: Pair, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    builders = FakeBuilders()
    with pytest.raises(MismatchError, match="weights differ"):
        pair.build(tmp_path / "a", builders, source=model_folder("qwen3", seed=9))
    with pytest.raises(MismatchError, match="the map was fitted for a target"):
        pair.build(tmp_path / "b", builders, target=model_folder("qwen3", layers=4))
    assert builders.built == []
    assert list(tmp_path.iterdir()) == []


def test_a_map_without_evidence(pair: Pair, tmp_path: Path) -> None:
    bare = random_map(load_model(pair.source), load_model(pair.target))
    path = tmp_path / "bare.kvmap.safetensors"
    bare.save(path)
    with pytest.raises(UnprovenError, match="no evidence"):
        pair.build(tmp_path / "pipeline", kvmap_path=path)
    pair.build(tmp_path / "pipeline", kvmap_path=path, allow_unproven=True)
    assert read_manifest(tmp_path / "pipeline").kvmap_digest == read_digest(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_changed(built: Path, name: str) -> None:
    content = bytearray((built / name).read_bytes())
    content[-1] ^= 1
    (built / name).write_bytes(content)
    with pytest.raises(FormatError, match=rf"{name} is not the file"):
        read_manifest(built)


def test_files_that_are_missing_or_foreign(built: Path) -> None:
    (built / "target" / "rank0.engine").rename(built / "target" / "rank1.engine")
    with pytest.raises(
        FormatError, match=r"lacks target/rank0\.engine and holds target/rank1\.engine"
    ):
        read_manifest(built)


def change(folder: Path, alter: Callable[[dict], object]) -> None:
    entry = json.loads((folder / NAME).read_text())
    alter(entry)
    (folder / NAME).write_text(json.dumps(entry))


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda e: e.update(version=2), "format version 2; this package reads version 1"),
        (lambda e: e.update(kind="something"), "not the manifest of a pipeline"),
        (lambda e: e.pop("target"), "lacks target, or should not have"),
        (lambda e: e.update(more=1), "lacks more, or should not have"),
        (lambda e: e["config"].update(tokens_per_block=24), "power of two"),
        (lambda e: e["config"].update(beams=2), "no setting beams"),
        (lambda e: e["source"].pop("rope"), "cannot be read"),
        (lambda e: e["source_fingerprint"].pop("weights"), "cannot be read"),
        (lambda e: e.update(tensorrt=""), "must be texts that are not empty"),
        (lambda e: e["files"].update({"../x": {"bytes": 1, "sha256": "0"}}), "outside the folder"),
        (lambda e: e["files"].update({"x": {"bytes": 1}}), "cannot be read"),
        (lambda e: e["files"].update({"x": {"bytes": 1, "sha256": "0"}}), "lacks x"),
        (lambda e: e["files"].clear(), "which it did not come with"),
    ],
)
def test_a_manifest_that_was_edited(
    built: Path, alter: Callable[[dict], object], said: str
) -> None:
    change(built, alter)
    with pytest.raises(FormatError, match=said):
        read_manifest(built)


def test_no_manifest_or_half_of_one(built: Path) -> None:
    text = (built / NAME).read_text()
    (built / NAME).write_text(text[: len(text) // 2])
    with pytest.raises(FormatError, match="is damaged"):
        read_manifest(built)
    (built / NAME).unlink()
    with pytest.raises(FormatError, match="There is no"):
        read_manifest(built)


def test_a_record_is_size_and_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    # The digest of "abc" from FIPS 180-4's examples.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert FileRecord.of(tmp_path / "f") == FileRecord(3, digest)
