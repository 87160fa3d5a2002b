"""Clusters, multicast boxes and remote arrivals against the PTX ISA, and mistakes with them."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from emulated_build import ROOT, missing, shared_object, translated_text
from emulator_library import COPIES, ORDERS, Library

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "g++ and headers are here")

SOURCE = ROOT / "tests/cpp/emulator_cluster.cu"
CLUSTERS, STEPS, BOX = 2, 7, (16, 64)

# The mistake, and what the sentence says; nothing where the data are wrong instead.
BUGS = {
    "no remote arrival": (1, "deadlock"),
    "own count": (2, ""),
    "wrong rank": (3, ""),
    "own mask": (4, "deadlock"),
    "wide mask": (5, "mask 0x7 in a cluster of 2 blocks"),
    "bytes": (6, ""),
    "no barrier before": (7, "there is no mbarrier at shared address"),
    "no barrier after": (8, "of the cluster has ended"),
}


@pytest.fixture(scope="module")
def library() -> Library:
    ptx = [SOURCE] if shutil.which("nvcc") else []
    return Library(shared_object("emulator_cluster", [SOURCE], ptx=ptx, arch="sm_90a"))


def share(library: Library, blocks: int, bug: int = 0) -> tuple[str, bool]:
    """The sentence, and whether every block found every box where it belongs."""
    random = np.random.default_rng(6)
    tensor = random.integers(0, 2**16, (STEPS, blocks, *BOX)).astype(np.uint16)
    out = np.full((CLUSTERS * blocks, *tensor.shape), 0xFFFF, np.uint16)
    ranks = np.full(CLUSTERS * blocks, -1, np.int32)
    sentence = library.call("runMulticast", bug, blocks, CLUSTERS, STEPS, tensor, ranks, out)
    right = all(np.array_equal(found, tensor) for found in out)
    return sentence, right and ranks.tolist() == list(range(blocks)) * CLUSTERS


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_cluster_shares_what_its_blocks_copy(
    library: Library, order: str, copies: str, blocks: int
) -> None:
    for seed in (1, 2, 3):
        library.configure(order=order, copies=copies, seed=seed)
        assert share(library, blocks) == ("", True)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_found_by_default(library: Library, bug: str, seed: int) -> None:
    number, words = BUGS[bug]
    library.configure(seed=seed)
    sentence, right = share(library, 2, number)
    assert words in sentence
    assert sentence or not right


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_the_ptx_does_the_same_and_has_the_same_bugs(library: Library) -> None:
    library.configure(path="ptx")
    assert share(library, 2) == share(library, 4) == ("", True)
    for number, words in BUGS.values():
        sentence, right = share(library, 2, number)
        assert words in sentence
        assert sentence or not right


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("barrier.cluster.arrive.release; barrier.cluster.arrive.release;", "a second time"),
        ("barrier.cluster.wait.acquire;", "without an arrive"),
        (
            "mapa.shared::cluster.u32 %r1, %r2, 1; mbarrier.arrive.shared::cluster.b64 _, [%r1];",
            "rank 1 in a cluster of 1 blocks",
        ),
        (
            "mapa.shared::cluster.u32 %r1, %r2, 0; mbarrier.arrive.shared.b64 _, [%r1];",
            "out of range",
        ),
    ],
    ids=["arrives-twice", "waits-only", "no-such-rank", "cluster-address-in-the-block"],
)
def test_misuse_is_named(body: str, words: str) -> None:
    text = (
        f".visible .entry k(.param .u64 k_p) {{ .reg .b32 %r<4>; mov.b32 %r2, 1024; {body} ret; }}"
    )
    library = ctypes.CDLL(
        str(shared_object("misuse", [], translations=[translated_text(text, "misuse")]))
    )
    library.trtllmKvMapEmulatorRunPtx.restype = ctypes.c_char_p
    sentence = library.trtllmKvMapEmulatorRunPtx(b"k", 1, 32, 64, bytes(8), 8)
    assert words in (sentence or b"").decode()
