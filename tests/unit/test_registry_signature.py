"""Maps signed by a key, and what a registry with that key refuses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_case import vouched
from handmade_maps import random_map
from typer.testing import CliRunner

from trtllm_kvmap.artifact.registry import Registry
from trtllm_kvmap.artifact.signature import require_signature, sign
from trtllm_kvmap.cli.verbs import app
from trtllm_kvmap.errors import FormatError, InputError, UnprovenError

pytest.importorskip(
    "cryptography", reason="needs the package cryptography (extra `signatures`; the lanes have it)"
)


def new_keys(kind: str = "ed25519") -> tuple[bytes, bytes]:
    """(private, public) in PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

    kinds: dict[str, Any] = {
        "ed25519": ed25519.Ed25519PrivateKey,
        "x25519": x25519.X25519PrivateKey,
    }
    key = kinds[kind].generate()
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return (
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo),
    )


# RFC 8032, section 7.1, test 1: the secret key and its public key.
SECRET = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


def test_the_algorithm_is_that_of_rfc_8032() -> None:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(SECRET))
    assert key.public_key().public_bytes_raw().hex() == PUBLIC
    from cryptography.hazmat.primitives import serialization

    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    digest = "ab" * 32
    assert sign(digest, pem) == key.sign(b"trtllm_kvmap map " + digest.encode()).hex()


def test_only_maps_that_the_key_signed_are_loaded(tmp_path: Path, random_model: Callable) -> None:
    pair = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    prints = pair[0].fingerprint, pair[1].fingerprint
    (private, public), (_, foreign) = new_keys(), new_keys()
    kvmap = vouched(random_map(*pair))
    writer = Registry(tmp_path)
    entry = writer.add(kvmap)
    other = writer.add(vouched(random_map(*pair, seed=1)))
    strict = Registry(tmp_path, public_key=public)
    with pytest.raises(UnprovenError, match="no signature"):
        strict.load(*prints)
    writer.sign(entry, private)
    assert strict.load(*prints).evidence == kvmap.evidence
    assert strict.problems(entry) == []
    assert [e.signed for e in writer.entries() if e.path == entry.path] == [True]
    with pytest.raises(UnprovenError, match="not one of this map"):
        Registry(tmp_path, public_key=foreign).open(entry)
    signature = (tmp_path / f"{entry.path}.sig").read_text()
    for wrong in (signature[:-2], signature[:-1] + "x", "", signature.swapcase()[::-1]):
        with pytest.raises(UnprovenError):
            require_signature("m", entry.digest, wrong, public)
    with pytest.raises(UnprovenError):  # the signature of another map
        require_signature("m", other.digest, signature, public)
    assert "no signature" in strict.problems(other)[0]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing", "link too long"])
def test_a_signature_that_is_no_file_is_refused(
    tmp_path: Path, random_model: Callable, kind: str
) -> None:
    """Nobody waits for a pipe, and no signature is laid into a folder as if it were signed then."""
    pair = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    private, public = new_keys()
    registry = Registry(tmp_path / "maps", public_key=public)
    entry = registry.add(vouched(random_map(*pair)))
    path = tmp_path / "maps" / f"{entry.path}.sig"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to(tmp_path / "gone")
    else:
        path.symlink_to("m" * 300)
    writer = threading.Timer(5, path.write_bytes, [b"late"])
    if kind == "pipe":
        writer.start()  # so that a reader that waits for one fails instead
    try:
        for refused in (
            lambda: registry.open(entry),
            lambda: registry.load(pair[0].fingerprint, pair[1].fingerprint),
            lambda: registry.sign(entry, private),
        ):
            with pytest.raises(FormatError, match=r"\.sig is neither a file nor a link to one"):
                refused()
        assert "neither a file" in " ".join(registry.problems(entry))
        assert [each.signed for each in registry.entries()] == [False]
        assert kind != "pipe" or writer.is_alive(), "somebody waited for the pipe"
    finally:
        writer.cancel()
    assert kind != "folder" or not list(path.iterdir())
    assert not list((tmp_path / "maps").glob("*.part"))


def test_a_link_to_a_signature_is_one(tmp_path: Path, random_model: Callable) -> None:
    pair = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    private, public = new_keys()
    registry = Registry(tmp_path / "maps", public_key=public)
    entry = registry.add(vouched(random_map(*pair)))
    registry.sign(entry, private)
    path = tmp_path / "maps" / f"{entry.path}.sig"
    path.rename(tmp_path / "kept")
    path.symlink_to(tmp_path / "kept")
    assert registry.problems(entry) == []
    assert [each.signed for each in registry.entries()] == [True]


def test_verify_blames_no_map_for_a_key_that_is_none(
    tmp_path: Path, random_model: Callable
) -> None:
    pair = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    folder, key = tmp_path / "maps", tmp_path / "key.pem"
    Registry(folder).add(vouched(random_map(*pair)))
    key.write_text("no key")
    result = CliRunner().invoke(app, ["registry", "verify", str(folder), "--public-key", str(key)])
    assert result.exit_code == 2
    assert "no PEM file" in result.output
    assert ".kvmap.safetensors" not in result.output


def test_keys_that_are_none_are_refused() -> None:
    private, public = new_keys()
    with pytest.raises(FormatError, match="no PEM"):
        sign("d", b"nothing")
    with pytest.raises(FormatError, match="no PEM"):
        require_signature("m", "d", "00", private)
    with pytest.raises(InputError, match="ed25519 key is needed"):
        sign("d", new_keys("x25519")[0])
    assert public


def test_a_map_is_signed_and_verified_from_the_command_line(
    tmp_path: Path, random_model: Callable
) -> None:
    pair = random_model("qwen3", seed=1), random_model("qwen3", seed=2, layers=3)
    folder = tmp_path / "maps"
    entry = Registry(folder).add(vouched(random_map(*pair)))
    private, public = (tmp_path / name for name in ("private.pem", "public.pem"))
    for path, key in zip((private, public), new_keys(), strict=True):
        path.write_bytes(key)

    def status(*arguments: object) -> int:
        return CliRunner().invoke(app, ["registry", *map(str, arguments)]).exit_code

    assert status("verify", folder, "--public-key", public) == 1
    assert status("sign", folder, entry.path, "--private-key", private) == 0
    assert status("verify", folder, "--public-key", public) == 0
    assert status("sign", folder, "absent", "--private-key", private) == 2
    assert status("verify", folder, "--public-key", tmp_path / "absent.pem") == 2
