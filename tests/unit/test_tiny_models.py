"""The tiny family keeps its card's promises: something to transfer, and strangers to each other."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.tiny import FAMILY, PAIRS, model_folder
from trtllm_kvmap.tiny.documents import Document, make_document

DOCUMENTS, QUESTIONS, CHOICES, CHANCE = 40, 4, 4, 0.25


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Documents that neither the training (seeds 11, 22, 33) nor the demo (1, 2, 3) draws."""
    rng = np.random.default_rng(1000)
    return [
        make_document(rng, int(rng.integers(256, 1025)), int(rng.integers(8, 25)), QUESTIONS)
        for _ in range(DOCUMENTS)
    ]


@pytest.fixture(scope="module")
def accuracy(documents: list[Document]) -> dict[tuple[str, bool], np.ndarray]:
    """By (model, document shown): the share of right answers per document."""
    scored = {}
    for name in FAMILY:
        loaded = load_model(model_folder(name))
        for shown in (True, False):
            scored[name, shown] = np.array([right(loaded, d, shown) for d in documents])
    return scored


def right(loaded: LoadedModel, document: Document, shown: bool) -> float:
    text = document.text if shown else document.text.split()[0]
    read = prefill(loaded, loaded.tokenise(text))
    hits = []
    for question in document.questions:
        stem = loaded.tokenise(question.stem, add_special_tokens=False)
        entries = read.cache.get_seq_length()
        logits = prefill(loaded, stem, fork(read.cache, entries), logits_to_keep=1).logits[-1]
        choices = [loaded.tokenise(c, add_special_tokens=False)[0] for c in question.choices]
        hits.append(int(logits[choices].argmax()) == question.label)
    return float(np.mean(hits))


def interval(per_document: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval over documents of accuracy above chance."""
    rng = np.random.default_rng(0)
    drawn = per_document[rng.integers(len(per_document), size=(2000, len(per_document)))].mean(1)
    low, high = np.quantile((drawn - CHANCE) / (1 - CHANCE), (0.025, 0.975))
    return float(low), float(high)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_target_beats_the_source_by_fifteen_points(
    accuracy: dict[tuple[str, bool], np.ndarray], source: str, target: str
) -> None:
    small, large = accuracy[source, True], accuracy[target, True]
    assert (large.mean() - small.mean()) / (1 - CHANCE) >= 0.15
    assert interval(large)[0] > interval(small)[1]
    assert interval(small)[0] > 0.1, "the source has to have read something"


@pytest.mark.parametrize("name", FAMILY)
def test_without_the_document_every_model_is_at_chance(
    accuracy: dict[tuple[str, bool], np.ndarray], name: str
) -> None:
    low, high = interval(accuracy[name, False])
    assert low <= 0 <= high


@pytest.mark.parametrize("name", FAMILY)
def test_the_card_says_what_a_member_can_do(
    accuracy: dict[tuple[str, bool], np.ndarray], name: str
) -> None:
    card = (model_folder(name).parent / "README.md").read_text()
    (cells,) = re.findall(rf"^\| `{name}` \| (\d\.\d.*) \| (\d\.\d.*) \|$", card, re.MULTILINE)
    for cell, shown in zip(cells, (True, False), strict=True):
        measured = accuracy[name, shown]
        low, high = (CHANCE + (1 - CHANCE) * bound for bound in interval(measured))
        said = [float(number) for number in re.findall(r"\d\.\d+", cell)]
        assert said == pytest.approx([measured.mean(), low, high], abs=0.01)  # one answer is 0.006


def test_the_family_is_small_and_whole() -> None:
    total = 0
    for name in FAMILY:
        folder = model_folder(name)
        files = {file.name for file in folder.iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= files
        total += sum(file.stat().st_size for file in Path(folder).iterdir())
    assert total <= 30e6


def test_no_member_was_grown_from_another() -> None:
    """Embeddings are the only tensors of one shape in m and x; trained apart, they do not agree."""
    name = "model.embed_tokens.weight"
    one, other = (
        load_file(model_folder(n) / "model.safetensors")[name] for n in ("tiny-m", "tiny-x")
    )
    one, other = one[1:], other[1:]  # <pad> never trains
    cosine = (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))
    assert abs(float(cosine.mean())) < 0.1


def test_geometries_are_what_the_pairs_need() -> None:
    s, m, x = (load_model(model_folder(name)).spec for name in FAMILY)
    assert (m.num_kv_heads, m.head_dim) == (s.num_kv_heads, s.head_dim)
    assert m.num_layers > s.num_layers
    assert x.num_kv_heads != s.num_kv_heads
    assert x.head_dim != s.head_dim
    assert {s.head_dim, m.head_dim, x.head_dim} <= {32, 64, 96, 128}
