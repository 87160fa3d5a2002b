"""Rows of a batch that grow by unequal numbers of tokens and give some back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from caches import random_tokens

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.speculation.ragged import RaggedRows
from trtllm_kvmap.inject.hf_cache import (
    Pass,
    fork,
    keep_entries,
    make_cache,
    num_entries,
    record_pass,
    view_pool,
    written_lengths,
)


def test_rows_read_as_if_alone_whatever_the_others_do(random_model: Callable) -> None:
    """Three rows, one of them padded; tokens are added and taken back in every mixture, and each
    row is compared with a cache that has read just what is left.
    """
    loaded = random_model()
    said = [random_tokens(12, 1), random_tokens(12, 2), random_tokens(7, 3)]
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[2, :5] = False
    ids = torch.tensor([said[0], said[1], [0] * 5 + said[2]])
    given = prefill(loaded, ids, attention_mask=mask).cache
    before = [part.clone() for part in view_pool(given).keys]
    rows = RaggedRows(loaded, given, mask)
    steps = [
        ([[5, 6, 7], [], [8]], [15, 12, 8]),  # all kept
        ([[9, 10], [11, 12, 13], [14]], [16, 12, 9]),  # some taken back, one row entirely
        ([[15], [], []], [17, 12, 9]),
        ([[16, 17], [18, 19], [20, 21]], [17, 12, 9]),  # nothing kept
    ]
    for new, lengths in steps:
        logits = rows.read(new)
        said = [old + more for old, more in zip(said, new, strict=True)]
        for row, (whole, more) in enumerate(zip(said, new, strict=True)):
            alone = prefill(loaded, whole).logits[len(whole) - len(more) :]
            torch.testing.assert_close(logits[row, : len(more)], alone, rtol=0, atol=5e-5)
        said = [whole[:length] for whole, length in zip(said, lengths, strict=True)]
        rows.settle(lengths)
        assert rows.lengths == lengths
        assert rows.mask.shape == (3, max(lengths))
        assert num_entries(rows.cache) == max(lengths)
        for row, whole in enumerate(said):
            kept = rows.mask[row]
            assert kept.tolist() == [False] * (max(lengths) - len(whole)) + [True] * len(whole)
            own = view_pool(prefill(loaded, whole).cache)
            mine = view_pool(rows.cache)
            for field in ("keys", "values"):
                for here, there in zip(getattr(mine, field), getattr(own, field), strict=True):
                    torch.testing.assert_close(here[row][:, kept], there[0], rtol=0, atol=5e-5)
    assert all(map(torch.equal, before, view_pool(given).keys)), "the given cache was changed"


def test_a_row_at_the_models_limit_does_not_hold_up_a_shorter_one(random_model: Callable) -> None:
    loaded = random_model(max_positions=20)
    ids, mask = (
        torch.tensor([random_tokens(19, 1), random_tokens(19, 2)]),
        torch.ones(2, 19, dtype=torch.bool),
    )
    mask[1, :10] = False
    read = prefill(loaded, ids, attention_mask=mask)
    rows = RaggedRows(loaded, read.cache, mask)
    for new in ([[7], [8, 9, 10]], [[], [11, 12, 13]]):
        logits = rows.read(new)
    alone = prefill(loaded, [*ids[1, 10:].tolist(), 8, 9, 10, 11, 12, 13]).logits
    torch.testing.assert_close(logits[1], alone[-3:], rtol=0, atol=5e-5)


def test_kept_entries_close_up_behind_zeros(random_model: Callable) -> None:
    """Against a loop, on a cache whose every number is another; a row's order is kept."""
    loaded = random_model()
    cache = make_cache(loaded.spec, 6, batch=2)
    pool = view_pool(cache)
    for index, part in enumerate((*pool.keys, *pool.values)):
        part.copy_(1000 * (index + 1) + torch.arange(part.numel()).view(part.shape))
    kept = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 0, 1, 1, 0]]).bool()
    closed = view_pool(keep_entries(cache, kept))
    for before, after in zip(
        (*pool.keys, *pool.values), (*closed.keys, *closed.values), strict=True
    ):
        expected = torch.zeros_like(before[:, :, :4])
        expected[0] = before[0][:, [0, 2, 3, 5]]
        expected[1, :, 2:] = before[1][:, [3, 4]]
        assert torch.equal(after, expected)


def test_a_common_beginning_is_kept_without_a_copy(random_model: Callable) -> None:
    cache = make_cache(random_model().spec, 6, batch=2)
    record_pass(cache, Pass(0, 6, 6))
    kept = torch.arange(6).expand(2, 6) < 4
    cut = keep_entries(cache, kept)
    assert num_entries(cut) == 4
    assert view_pool(cut).keys[0].data_ptr() == view_pool(cache).keys[0].data_ptr()
    assert written_lengths(cut, range(4)) == written_lengths(fork(cache, 4), range(4)) == [6]
