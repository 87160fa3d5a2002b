"""The report's formulas and its bootstrap, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trtllm_kvmap.evaluate import metrics
from trtllm_kvmap.evaluate.bootstrap import Figure, draw, figure


def test_ratios_by_hand() -> None:
    assert metrics.mean(3, 4) == 0.75
    assert metrics.retention(0.6, 0.8) == pytest.approx(0.75)
    assert metrics.retention_normalised(0.6, 0.8, 0.25) == pytest.approx(0.35 / 0.55)
    assert metrics.gap_recovered(0.7, 0.4, 0.8) == pytest.approx(0.75)
    assert metrics.perplexity_ratio(2.1, 1.9) == pytest.approx(math.exp(0.2))


def test_gap_recovered_of_losses_from_a_measured_pair() -> None:
    """DESIGN's own table: mapped 2.047, source 2.313, target 1.842 nats give 0.56."""
    gap = metrics.gap_recovered(2.047, 2.313, 1.842, lower_is_better=True)
    assert gap == pytest.approx(0.565, abs=1e-3)
    assert metrics.gap_recovered(2.617, 2.313, 1.842, lower_is_better=True) < 0


@pytest.mark.parametrize(
    "undefined",
    [
        metrics.mean(0, 0),
        metrics.retention(0.5, 0.0),
        metrics.retention_normalised(0.5, 0.25, 0.25),
        metrics.gap_recovered(0.5, 0.6, 0.6),
        metrics.gap_recovered(0.5, 0.7, 0.6),
        metrics.gap_recovered(2.0, 1.8, 1.9, lower_is_better=True),
    ],
)
def test_a_ratio_without_a_gap_is_undefined(undefined: np.ndarray) -> None:
    assert np.isnan(undefined)


def test_ratios_work_on_whole_draws() -> None:
    got = metrics.gap_recovered(
        np.array([0.7, 0.5, 0.9]), np.array([0.4, 0.5, 0.9]), np.array([0.8, 0.7, 0.6])
    )
    np.testing.assert_allclose(got, [0.75, 0.0, np.nan])


def test_best_choice() -> None:
    short, long = [-3.0], [-1.0, -1.0, -1.5]
    assert metrics.best_choice([short, long]) == 0
    assert metrics.best_choice([short, long], [len(short), len(long)]) == 1


def test_leading_agreement() -> None:
    assert metrics.leading_agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert metrics.leading_agreement([1, 2], [1, 2]) == 2
    assert metrics.leading_agreement([], []) == 0


def test_cosine() -> None:
    a = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    b = torch.tensor([[0.0, 2.0], [3.0, 3.0], [1.0, 0.0]])
    torch.testing.assert_close(metrics.cosine(a, b), torch.tensor([0.0, 1.0, 0.0]).double())


def test_draws_keep_the_number_of_items_and_start_with_the_sample() -> None:
    counts = draw(7, 200, seed=3)
    assert counts.shape == (201, 7)
    np.testing.assert_array_equal(counts[0], np.ones(7))
    np.testing.assert_array_equal(counts.sum(axis=1), np.full(201, 7))
    np.testing.assert_array_equal(counts, draw(7, 200, seed=3))
    assert not np.array_equal(counts, draw(7, 200, seed=4))


def test_an_interval_covers_a_known_truth_about_as_often_as_it_says() -> None:
    """200 experiments of 60 documents whose questions share the document's luck; the true accuracy
    is 0.7.
    """
    rng = np.random.default_rng(0)
    covered = 0
    for experiment in range(200):
        luck = rng.beta(1.4, 0.6, size=60)  # mean 0.7
        correct = rng.binomial(6, luck)
        sums = draw(60, 400, seed=experiment) @ np.stack([correct, np.full(60, 6)], axis=1)
        interval = figure(metrics.mean(sums[:, 0], sums[:, 1]))
        assert interval.value == pytest.approx(correct.sum() / 360)
        covered += interval.low <= 0.7 <= interval.high
    assert 180 <= covered <= 199


def test_a_figure_that_the_items_cannot_tell() -> None:
    assert figure(np.full(11, np.nan)) == Figure(None, None, None)
    assert figure(np.array([0.5] + [np.nan] * 10)) == Figure(0.5, None, None)
    one_in_a_hundred = np.array([0.5] + [0.4] * 99 + [np.nan])
    assert figure(one_in_a_hundred) == Figure(0.5, 0.4, 0.4)
    assert Figure.from_json(Figure(0.5, 0.4, None).to_json()) == Figure(0.5, 0.4, None)
