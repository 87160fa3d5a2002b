"""A folder of maps: listed, found, loaded, kept by size; damage and other writers beside it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from evidence_case import vouched, whole_evidence, without_a_gap
from fit_rows import make_spec
from handmade_maps import random_map
from typer.testing import CliRunner

from trtllm_kvmap.artifact.entry import UNPRINTABLE, Entry, Unusable
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.registry import Registry
from trtllm_kvmap.artifact.resident import Resident
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.errors import FormatError, InputError, MismatchError, UnprovenError
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.fit.sizes import map_parameters, router_sizes
from trtllm_kvmap.mapper.ready import ReadyMappers
from trtllm_kvmap.models import LoadedModel

Pair = tuple[LoadedModel, LoadedModel]


@pytest.fixture(scope="module")
def pair(random_model: Callable) -> Pair:
    return random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)


def proven(pair: Pair, gap: float = 0.5, **options: Any) -> KvMap:
    return vouched(random_map(*pair, **options), whole_evidence(gap))


def prints(pair: Pair) -> tuple[Any, Any]:
    return pair[0].fingerprint, pair[1].fingerprint


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of a real S3 protocol on this machine (moto's server), and s3fs told of it."""
    absent = "no {} here; build_scripts/run_tests.py -k s3 installs it"
    s3fs = pytest.importorskip("s3fs", reason=absent.format("s3fs"))
    moto = pytest.importorskip("moto.server", reason=absent.format("moto's server"))
    print(f"s3fs {s3fs.__version__}, {s3fs.__file__}")
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }.items():
                patch.setenv(name, value)
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().mkdir("registry")
            yield "s3://registry"
            s3fs.S3FileSystem.clear_instance_cache()
    finally:
        server.stop()


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new place of each kind: a folder, a file system that is none, and an object store."""
    if request.param == "folder":
        return str(tmp_path / "maps")
    if request.param == "memory":
        return f"memory://{tmp_path.name}/maps"
    return f"{request.getfixturevalue('bucket')}/{tmp_path.name}/maps"


def test_maps_of_every_direction_are_listed_and_loaded(url: str, pair: Pair) -> None:
    registry, back = Registry(url), (pair[1], pair[0])
    added = [registry.add(proven(pair)), registry.add(random_map(*back))]
    assert sorted(registry.scan(), key=lambda e: e.path) == sorted(added, key=lambda e: e.path)
    assert [e.proven for e in added] == [True, False]
    assert added[0].path.endswith(f"-{added[0].digest[:16]}.kvmap.safetensors")
    assert registry.find(*prints(pair)) == [added[0]]
    loaded = registry.load(*prints(pair))
    for mine, theirs in zip(loaded.groups, proven(pair).groups, strict=True):
        assert torch.equal(mine.weight, theirs.weight)
    with pytest.raises(UnprovenError, match="no evidence"):
        registry.load(*prints(back))
    assert registry.load(*prints(back), allow_unproven=True).source == pair[1].spec


def test_what_another_process_stores_is_seen(url: str, pair: Pair) -> None:
    registry = Registry(url)
    registry.add(proven(pair))
    assert len(registry.entries()) == 1
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    (held,) = files.find(root)
    files.copy(held, held.replace("-to-", "-and-"))
    assert len(registry.entries()) == 2


def test_the_best_proven_map_comes_first(tmp_path: Path, pair: Pair) -> None:
    registry = Registry(tmp_path)
    for gap in (0.2, 0.7, 0.4):
        registry.add(proven(pair, gap))
    registry.add(random_map(*pair))
    assert [e.gap_recovered for e in registry.find(*prints(pair))] == [0.7, 0.4, 0.2, None]
    assert registry.load(*prints(pair)).evidence == proven(pair, 0.7).evidence


def test_a_pair_is_known_by_its_weights_not_its_names(
    tmp_path: Path, pair: Pair, random_model: Callable
) -> None:
    registry = Registry(tmp_path)
    registry.add(proven(pair))
    other = random_model("qwen3", seed=3, layers=3)
    with pytest.raises(MismatchError, match="no map between"):
        registry.load(pair[0].fingerprint, other.fingerprint)


def test_damaged_files_stand_in_nobodys_way(tmp_path: Path, pair: Pair) -> None:
    registry = Registry(tmp_path)
    good = registry.add(proven(pair, 0.3))
    whole = (tmp_path / good.path).read_bytes()
    nested = tmp_path / "deeper"
    nested.mkdir()
    broken = {
        "half": whole[: len(whole) // 2],
        "longer": whole + b"\0",
        "empty": b"",
        "text": b"not a map at all",
        "huge": (1 << 62).to_bytes(8, "little") + b"{}",
        "list": (2).to_bytes(8, "little") + b"[]",
        "other": whole.replace(b"kvmap", b"moxap", 1),
        "binary": bytes(range(256)),
        "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    }
    for name, content in broken.items():
        (nested / f"{name}.kvmap.safetensors").write_bytes(content)
    (tmp_path / f"{good.path}.abcd.part").write_bytes(whole[:100])  # a writer that died
    (tmp_path / f".{good.path}.xyz").write_bytes(whole[:100])
    found = list(registry.scan())
    assert [e.path for e in found if isinstance(e, Entry)] == [good.path]
    unusable = {e.path: e.reason for e in found if isinstance(e, Unusable)}
    assert set(unusable) == {f"deeper/{name}.kvmap.safetensors" for name in broken}
    assert all(unusable.values())
    assert registry.load(*prints(pair)).evidence == proven(pair, 0.3).evidence


def test_a_better_map_that_is_damaged_gives_way_to_a_sound_one(tmp_path: Path, pair: Pair) -> None:
    registry = Registry(tmp_path)
    best, sound = registry.add(proven(pair, 0.9)), registry.add(proven(pair, 0.3))
    flip_last(tmp_path / best.path)
    assert [e.path for e in registry.find(*prints(pair))] == [best.path, sound.path]
    assert registry.load(*prints(pair)).evidence == proven(pair, 0.3).evidence
    assert any("digest" in problem for problem in registry.problems(best))
    assert registry.problems(sound) == []
    (tmp_path / sound.path).unlink()
    with pytest.raises(FormatError, match="digest"):
        registry.load(*prints(pair))


def flip_last(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_problems_name_what_speaks_against_a_map(tmp_path: Path, pair: Pair) -> None:
    registry = Registry(tmp_path)
    again = "; run `trtllm-kvmap evaluate --attach` on it."
    assert registry.problems(registry.add(random_map(*pair))) == [
        f"Unproven: it carries no evidence, so no held-out report vouches for it{again}"
    ]
    failed = whole_evidence(
        controls=whole_evidence()["controls"] | {"wrong_document": "not judged"}
    )
    entry = registry.add(vouched(random_map(*pair), failed))
    assert registry.problems(entry) == [
        f"Unproven: its evidence does not hold (wrong_document not passed){again}"
    ]
    strange = replace(proven(pair).source_fingerprint, tokenizer="other")
    other = vouched(replace(proven(pair), source_fingerprint=strange))
    said = registry.problems(registry.add(other))
    assert len(said) == 2
    assert "different tokenizers" in said[0]
    assert "no SHA-256" in said[1]


def test_a_map_between_two_tokenizers_loads_for_no_host(tmp_path: Path, pair: Pair) -> None:
    """A connector compares each model with the map, and never the two with each other."""
    strange = replace(proven(pair).source_fingerprint, tokenizer="0" * 64)
    replace(proven(pair), source_fingerprint=strange).save(tmp_path / "map")
    for allow in (False, True):
        with pytest.raises(MismatchError, match="different tokenizers"):
            KvMap.load(tmp_path / "map", allow_unproven=allow)


def test_a_source_that_is_the_better_model_is_said_once(tmp_path: Path, pair: Pair) -> None:
    """A result, not a fault of the report: there is no call to evaluate it again."""
    registry = Registry(tmp_path)
    entry = registry.add(vouched(random_map(*pair), without_a_gap()))
    assert registry.problems(entry) == [
        "Unproven: its source alone is no worse than its target (nll 5.58 against 5.79), so there "
        "is no gap to recover; let the source answer, or evaluate it on what the target does "
        "better."
    ]


def test_a_file_that_became_another_map_is_refused(tmp_path: Path, pair: Pair) -> None:
    registry = Registry(tmp_path)
    first, second = registry.add(proven(pair)), registry.add(proven(pair, seed=1))
    (tmp_path / second.path).replace(tmp_path / first.path)
    with pytest.raises(MismatchError, match="became another map"):
        registry.open(first)


def test_writers_and_readers_at_once_see_whole_maps_only(url: str, pair: Pair) -> None:
    registry = Registry(url)
    maps = [proven(pair, seed=seed) for seed in range(3)]
    registry.add(maps[0])
    seen: list[Entry | Unusable] = []
    errors: list[BaseException] = []

    def work(step: Callable[[], Any]) -> None:
        try:
            for _ in range(8):
                step()
        except BaseException as error:  # a thread would swallow it
            errors.append(error)

    steps = [
        *(lambda m=kvmap: Registry(url).add(m) for kvmap in (*maps, maps[0])),
        lambda: seen.extend(Registry(url).scan()),
        lambda: Registry(url).load(*prints(pair)),
    ]
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert seen
    assert [e for e in seen if isinstance(e, Unusable)] == []
    assert len(registry.entries()) == 3  # equal maps are one file


def test_a_writer_that_fails_half_way_leaves_nothing(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)
    before = registry.add(proven(pair))
    meanwhile: list[Entry | Unusable] = []

    def torn(local: str, path: str) -> None:
        Path(path).write_bytes(Path(local).read_bytes()[:100])
        meanwhile.extend(Registry(tmp_path).scan())
        raise OSError("no space left")

    monkeypatch.setattr(registry._files, "put_file", torn)
    with pytest.raises(InputError, match="no space left"):
        registry.add(proven(pair, seed=1))
    assert meanwhile == [before]
    assert [path.name for path in tmp_path.iterdir()] == [before.path]


def test_a_name_longer_than_a_file_may_have_is_told(tmp_path: Path, pair: Pair) -> None:
    kvmap = proven(pair)
    named = replace(kvmap, source=replace(kvmap.source, name="m" * 300))
    with pytest.raises(InputError, match="cannot be written to the registry"):
        Registry(tmp_path).add(named)
    assert list(tmp_path.iterdir()) == []


def test_what_was_used_least_recently_leaves_first() -> None:
    made: list[str] = []

    def make(name: str, size: int) -> Callable[[], tuple[str, int]]:
        return lambda: (made.append(name) or name, size)  # type: ignore[func-returns-value]

    held: Resident[str] = Resident(10)
    for name in ("a", "b", "a", "c", "b"):  # c drives b out, b drives a out
        assert held.get(name, make(name, 4)) == name
    assert made == ["a", "b", "c", "b"]
    assert held.keys == ["c", "b"]
    assert held.held_bytes == 8
    assert held.get("large", make("large", 11)) == "large"
    assert held.keys == ["c", "b"]
    with pytest.raises(InputError, match="negative"):
        Resident(-1)


def test_a_device_holds_what_fits_and_the_host_the_rest(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, back = Registry(tmp_path), (pair[1], pair[0])
    for each in (pair, back):
        registry.add(proven(each))
    read: list[str] = []
    whole = Registry._read

    def counted(self: Registry, entry: Entry) -> Any:
        read.append(entry.path)
        return whole(self, entry)

    monkeypatch.setattr(Registry, "_read", counted)
    largest = max(proven(each).num_parameters for each in (pair, back))
    ready = ReadyMappers(registry, device_bytes=4 * largest)
    first = ready.mapper(*prints(pair))
    assert ready.mapper(*prints(pair)) is first
    ready.mapper(*prints(back))
    assert ready.resident.keys == [prints(back)]
    assert ready.mapper(*prints(pair)) is not first
    assert len(read) == 2  # each map was read once: it waited in host memory


def test_a_map_without_evidence_is_never_made_ready(tmp_path: Path, pair: Pair) -> None:
    registry = Registry(tmp_path)
    registry.add(random_map(*pair))
    with pytest.raises(UnprovenError, match="no evidence"):
        ReadyMappers(registry, None).mapper(*prints(pair))


def test_a_registry_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no registry at"):
        list(Registry(tmp_path / "absent").scan())
    with pytest.raises(InputError, match="cannot be opened"):
        Registry("nosuchprotocol://x")


def test_a_registry_that_cannot_be_written_says_so(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot be written to the registry"):
            Registry(place).add(proven(pair))
    locked = Registry(tmp_path / "locked" / "new")

    def refused(path: str, exist_ok: bool) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(locked._files, "makedirs", refused)
    with pytest.raises(InputError, match="Permission denied"):
        locked.add(proven(pair))
    assert (tmp_path / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def lock(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As for a user who may not read ``folder``; a mode would not keep an administrator out."""
    scan = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)
    entry = registry.add(proven(pair))
    inner = tmp_path / "inner"
    Registry(inner).add(proven(pair, seed=1))
    assert len(registry.entries()) == 2
    with monkeypatch.context() as patch:
        lock(patch, inner)
        assert [each.path for each in registry.scan()] == ["inner", entry.path]
        assert "Permission denied" in run("registry", "verify", tmp_path, status=1)
        assert "unusable: inner: " in run("registry", "list", tmp_path)
        assert registry.load(*prints(pair))
    lock(monkeypatch, tmp_path)
    with pytest.raises(InputError, match=r"cannot be read .*Permission denied"):
        registry.entries()
    for verb in ("list", "verify"):
        said = " ".join(run("registry", verb, tmp_path, status=2).split())
        assert "cannot be read ([Errno 13] Permission denied" in said


BIDI = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]


def test_what_turns_the_direction_of_writing_is_no_part_of_a_name() -> None:
    """Those with the property Bidi_Control in Unicode 15.1, PropList.txt, and no neighbour."""
    near = {c + step for c in BIDI for step in (-1, 1)} - {*BIDI, 0x2029}
    assert all(UNPRINTABLE.search(f"Qwen{chr(c)}3") for c in BIDI)
    assert not any(UNPRINTABLE.search(f"Qwen{chr(c)}3") for c in near)


@pytest.mark.parametrize(
    "name", ["half \ud800", "a\nb: sound", "\x1b[31mred", "a\u202edrow", "a\u2067drow"]
)
def test_names_that_cannot_be_printed_stand_in_nobodys_way(
    tmp_path: Path, pair: Pair, name: str
) -> None:
    """No text a terminal can show, or text that writes lines of its own into a list."""
    registry, kvmap = Registry(tmp_path), proven(pair, seed=1)
    sound = registry.add(proven(pair))
    kvmap = replace(kvmap, source=replace(kvmap.source, name=name))
    with pytest.raises(FormatError, match="its names are"):
        registry.add(kvmap)
    kvmap.save(tmp_path / "odd.kvmap.safetensors")
    file = os.fsencode(tmp_path) + b"/\xff\n.kvmap.safetensors"
    shutil.copy(tmp_path / sound.path, file)
    found = {each.path: each for each in registry.scan()}
    assert found.pop(sound.path) == sound
    assert sorted(found) == [r"\udcff\n.kvmap.safetensors", "odd.kvmap.safetensors"]
    for each in found.values():
        assert isinstance(each, Unusable)
        assert (each.path + each.reason).isprintable()
    assert registry.load(*prints(pair))
    said = run("registry", "list", tmp_path).splitlines()
    assert len(said) == 4
    assert len(run("registry", "verify", tmp_path, status=1).splitlines()) == 3


def test_an_empty_folder_is_said_to_hold_no_map(tmp_path: Path) -> None:
    for verb in ("list", "verify"):
        assert f"{tmp_path} holds no map" in run("registry", verb, tmp_path)


def test_a_pipe_and_a_link_to_nothing_stand_in_nobodys_way(tmp_path: Path, pair: Pair) -> None:
    registry = Registry(tmp_path)
    entry = registry.add(proven(pair))
    (tmp_path / "linked.kvmap.safetensors").symlink_to(tmp_path / entry.path)
    (tmp_path / "nothing.kvmap.safetensors").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.kvmap.safetensors")
    writer = threading.Timer(5, (tmp_path / "pipe.kvmap.safetensors").write_bytes, [b"late"])
    writer.start()  # so that a reader that waits for one fails instead
    try:
        found = list(registry.scan())
    finally:
        waited = not writer.is_alive()
        writer.cancel()
    assert not waited
    assert sorted(each.path for each in found if isinstance(each, Entry)) == [
        "linked.kvmap.safetensors",
        entry.path,
    ]
    said = {each.path: each.reason for each in found if isinstance(each, Unusable)}
    assert sorted(said) == ["nothing.kvmap.safetensors", "pipe.kvmap.safetensors"]
    assert all("is neither a file nor a link to one" in reason for reason in said.values())


def test_another_file_system_that_cannot_be_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    registry = Registry(f"memory://{tmp_path.name}/locked")
    registry.add(proven(pair))

    def refused(path: str, **_: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(registry._files, "find", refused)
    with pytest.raises(InputError, match="Access Denied"):
        registry.entries()


SHAPES = [make_spec("a", 3, 2, 4), make_spec("b", 5, 2, 4), make_spec("c", 4, 2, 4)]


def test_sizes_follow_the_formula() -> None:
    a, b = SHAPES[:2]
    # For keys and for values, 5 layers: 2 of 3 source layers x 2 heads x 4 -> 2 x 4, and a bias.
    assert map_parameters(a, b, FitConfig("pooled", k=2)) == 2 * 5 * (16 * 8 + 8)
    assert map_parameters(a, b, FitConfig("pooled", k=9)) == 2 * 5 * (24 * 8 + 8)
    assert map_parameters(a, b, FitConfig("head", k=2, fields="both")) == 2 * 10 * (16 * 4 + 4)
    assert map_parameters(a, b, FitConfig("slice", n=3)) == 2 * 10 * (12 * 4 + 4)
    assert map_parameters(a, b, FitConfig("copy")) == 0
    sizes = router_sizes(SHAPES, FitConfig("head", k=1))
    one_layer = 2 * 2 * (4 * 4 + 4)
    assert [(s.models, s.maps) for s in sizes] == [(2, 2), (3, 6)]
    assert [s.parameters for s in sizes] == [one_layer * (5 + 3), one_layer * 2 * (3 + 5 + 4)]
    with pytest.raises(InputError, match="at least two"):
        router_sizes(SHAPES[:1], FitConfig())


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def test_the_command_line_lists_verifies_and_finds(
    tmp_path: Path, pair: Pair, model_folder: Callable
) -> None:
    folder, out, file = tmp_path / "maps", tmp_path / "out.json", tmp_path / "m"
    proven(pair, 0.6).save(file)
    run("registry", "add", folder, file)
    run("registry", "verify", folder)
    (folder / "torn.kvmap.safetensors").write_bytes(b"torn")
    listed = run("registry", "list", folder, "--json", out)
    said = json.loads(out.read_text())
    assert said["maps"][0]["path"] in listed.splitlines()  # whole, to be copied
    assert [m["gap_recovered"] for m in said["maps"]] == [0.6]
    assert [u["path"] for u in said["unusable"]] == ["torn.kvmap.safetensors"]
    shown = run("registry", "verify", folder, "--json", out, status=1)
    assert "torn.kvmap.safetensors: torn" in shown
    assert sorted(map(bool, json.loads(out.read_text()).values())) == [False, True]
    models = model_folder("qwen3", seed=1), model_folder("qwen3", seed=2, layers=3)
    options = ("--source", models[0], "--target", models[1], "--json", out)
    run("registry", "find", folder, *options)
    assert [m["proven"] for m in json.loads(out.read_text())] == [True]
    back = ("--source", models[1], "--target", models[0])
    run("registry", "find", folder, *back, status=2)
    run("registry", "sizes", "--json", out)
    rows = json.loads(out.read_text())
    assert [(r["models"], r["published_gb"]) for r in rows[:4]] == [
        (2, None),
        (3, 39),
        (4, 79),
        (5, 131),
    ]
    # Five Qwen3 models: each of 204 layers is the target of 4 maps, k = 8 of 1,024 -> 1,024.
    assert rows[3]["parameters"] == 4 * 204 * 2 * (8192 * 1024 + 1024)
