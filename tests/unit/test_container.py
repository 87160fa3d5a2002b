"""The envelope of both file formats: equal bytes, whole or absent, and every damage is noticed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trtllm_kvmap.artifact import container
from trtllm_kvmap.artifact.container import HEADER_KEY, read_container, write_container
from trtllm_kvmap.errors import FormatError, NumericsError

CONTENT = {"b": [1, 2.5, None, "words"], "a": {"nested": True}}


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(5, 7, generator=g),
        "sums": torch.randn(3, generator=g, dtype=torch.float64),
        "half": torch.randn(2, 2, generator=g).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "thing.safetensors"
    write_container(path, "thing", 3, CONTENT, tensors())
    return path


def refused(path: Path) -> str:
    with pytest.raises(FormatError) as error:
        read_container(path, "thing", 3)
    return str(error.value)


def test_round_trip(path: Path) -> None:
    content, found = read_container(path, "thing", 3)
    assert content == CONTENT
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_equal_input_gives_equal_bytes_and_digest(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    backwards = dict(reversed(tensors().items()))
    shuffled = dict(reversed(CONTENT.items()))
    strided = {name: t.mT.contiguous().mT if t.ndim > 1 else t for name, t in backwards.items()}
    first = write_container(path, "thing", 3, CONTENT, tensors())
    assert write_container(other, "thing", 3, shuffled, strided) == first
    assert other.read_bytes() == path.read_bytes()


def test_the_digest_tells_every_part_apart(tmp_path: Path) -> None:
    given = ("thing", 3, CONTENT, tensors())
    changed = tensors() | {"scalar": torch.tensor(1.25)}
    renamed = {name.replace("scalar", "number"): t for name, t in tensors().items()}
    reshaped = tensors() | {"weight": tensors()["weight"].view(7, 5)}
    variants = [
        given,
        ("other", *given[1:]),
        ("thing", 4, *given[2:]),
        ("thing", 3, {**CONTENT, "a": 1}, tensors()),
        *(("thing", 3, CONTENT, t) for t in (changed, renamed, reshaped)),
    ]
    digests = {write_container(tmp_path / "file", *variant) for variant in variants}
    assert len(digests) == len(variants)


def test_one_tensor_may_stand_under_two_names(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    write_container(tmp_path / "file", "thing", 3, {}, {"a": tensor, "b": tensor})
    _, found = read_container(tmp_path / "file", "thing", 3)
    assert torch.equal(found["a"], tensor)
    assert torch.equal(found["b"], tensor)


def test_every_truncation_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for seventh in range(7):
        path.write_bytes(whole[: len(whole) * seventh // 7])
        assert "is not a whole safetensors file" in refused(path)
    path.write_bytes(whole[:-1])
    refused(path)
    path.write_bytes(whole + b"\0")
    refused(path)


def test_a_flipped_bit_is_noticed_wherever_it_is(path: Path) -> None:
    whole = path.read_bytes()
    for index in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << index % 8
        path.write_bytes(damaged)
        refused(path)


def test_another_kind_another_version_and_no_file(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is a 'thing' file; a 'map' file is needed"):
        read_container(path, "map", 3)
    with pytest.raises(
        FormatError, match="has format version 3; this package reads versions 1 to 2"
    ):
        read_container(path, "thing", 2)
    with pytest.raises(FormatError, match="There is no file"):
        read_container(tmp_path / "absent", "thing", 3)
    with pytest.raises(FormatError, match="is a folder; give the file in it"):
        read_container(tmp_path, "thing", 3)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"x": torch.zeros(1)}, path)
    assert "was not written by trtllm_kvmap" in refused(path)
    for damaged in ("{", "[1]", "null"):
        save_file({"x": torch.zeros(1)}, path, metadata={HEADER_KEY: damaged})
        assert "damaged header" in refused(path)
    path.write_bytes(b"PK\x03\x04 something else entirely")
    assert "is not a whole safetensors file" in refused(path)


def test_an_edited_header_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    outer = json.loads(whole[8 : 8 + size])
    header = json.loads(outer["__metadata__"][HEADER_KEY])
    header["content"]["a"]["nested"] = False
    outer["__metadata__"][HEADER_KEY] = json.dumps(header)
    edited = json.dumps(outer).encode()
    path.write_bytes(struct.pack("<Q", len(edited)) + edited + whole[8 + size :])
    assert "does not match its digest" in refused(path)


def test_an_interrupted_write_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def killed_half_way(_: object, name: Path, **__: object) -> None:
        Path(name).write_bytes(before[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(container, "save_file", killed_half_way)
    with pytest.raises(KeyboardInterrupt):
        write_container(path, "thing", 3, {"new": 1}, tensors())
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_header_with_nan_writes_nothing(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(NumericsError, match="NaN or infinite"):
        write_container(path, "thing", 3, {"loss": float("nan")}, tensors())
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "value",
    ["[" * 100_000, '{"kind":' + "1" * 5000 + "}", '{"kind":NaN}', "[1]", "{"],
    ids=["deep", "endless integer", "not a number", "list", "torn"],
)
def test_a_header_that_json_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    save_file({}, tmp_path / "m", metadata={HEADER_KEY: value})
    assert str(tmp_path / "m") in refused(tmp_path / "m")


def test_content_that_could_not_have_been_written_is_refused(path: Path) -> None:
    """Python reads numbers from JSON that JSON has no word for."""
    before, after = '{"kind":"thing","version":3,"digest":"0","content":{"a":', "}}"
    for text in ("NaN", "1e999", "-Infinity"):
        save_file(tensors(), path, metadata={HEADER_KEY: before + text + after})
        refused(path)
