"""Speculation on a batch: each row as if alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import tokens
from handmade_maps import copy_map
from speculate_cases import NEW, nearly, read_alone, require_caches_hold_what_was_committed
from streams import require_equal_streams

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.decode.speculation.speculate import speculate
from trtllm_kvmap.inject.hf_cache import fork
from trtllm_kvmap.spec.plan import plan_handoff

LENGTHS = (40, 31, 11, 3)


@pytest.fixture
def batch(random_model: Callable) -> dict:
    """A left-padded batch, read by a draft and handed over to a verifier, and each row alone."""
    verifier = random_model()
    draft = nearly(verifier)
    bridge = KvBridge(copy_map(draft, verifier), source=draft, target=verifier)
    rows = [tokens(length, seed=length) for length in LENGTHS]
    ids, mask = torch.zeros(len(rows), 40, dtype=torch.long), torch.zeros(len(rows), 40)
    for index, row in enumerate(rows):
        ids[index, 40 - len(row) :] = row
        mask[index, 40 - len(row) :] = 1
    read = prefill(draft, ids, attention_mask=mask)
    handoff = bridge.hand_over(
        read.cache, ids, plan_handoff(40, repair_window=8), attention_mask=mask
    )
    alone = [
        bridge.hand_over(prefill(draft, row).cache, row, plan_handoff(len(row), repair_window=8))
        for row in rows
    ]
    return {
        "draft": draft,
        "verifier": verifier,
        "rows": rows,
        "mask": mask,
        "draft_cache": read.cache,
        "handoff": handoff,
        "alone": alone,
    }


@pytest.mark.parametrize("ends", [False, True], ids=["free", "with end tokens"])
def test_each_row_of_a_batch_is_decoded_as_if_alone(batch: dict, ends: bool) -> None:
    draft, verifier, handoff = batch["draft"], batch["verifier"], batch["handoff"]
    streams = [generate(verifier, fork(h.cache), h.logits, NEW) for h in batch["alone"]]
    late = {max(stream, key=stream.index) for stream in streams[:2]}  # new where they come
    stops = late if ends else set()
    result = speculate(
        draft,
        verifier,
        batch["draft_cache"],
        handoff.cache,
        handoff.logits,
        NEW,
        eos_token_ids=stops,
        attention_mask=batch["mask"],
        draft_length=DraftLength(confidence=0.01),
    )
    assert 0.1 < result.acceptance_rate < 1, "only one of two paths was taken"
    for index, (ids, alone, stream) in enumerate(
        zip(batch["rows"], batch["alone"], streams, strict=True)
    ):
        place = next((i for i, token in enumerate(stream) if token in stops), NEW - 1)
        expected = stream[: place + 1]
        chosen_from, cache = read_alone(verifier, alone.cache, alone.logits, expected)
        require_equal_streams(result.rows[index], expected, chosen_from, margin=1e-3)
        if result.rows[index] == expected:
            own = prefill(draft, [*ids.tolist(), *expected[:-1]]).cache
            require_caches_hold_what_was_committed(result, index, own, cache)
    assert result.rows[0] == streams[0][: len(result.rows[0])], "row 0 has no excuse"
    assert (len({len(row) for row in result.rows}) > 1) == ends
    one_by_one = [
        speculate(
            draft,
            verifier,
            prefill(draft, ids).cache,
            alone.cache,
            alone.logits,
            NEW,
            eos_token_ids=stops,
            draft_length=DraftLength(confidence=0.01),
        )
        for ids, alone in zip(batch["rows"], batch["alone"], strict=True)
    ]
    for count in ("proposed", "accepted", "row_steps"):  # each row has a block length of its own
        assert getattr(result, count) == sum(getattr(one, count) for one in one_by_one)
    assert result.row_steps > result.verifier_steps, "the rows did not run together"
    assert result.acceptance_length < result.tokens_per_verifier_step
