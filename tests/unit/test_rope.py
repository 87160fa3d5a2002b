"""RoPE as arithmetic: what a turn is, that it can be undone, and when one set of frequencies
ends.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.rotary import apply_rope, remove_rope
from trtllm_kvmap.spec.rope import RopeParams, rope_table, written_length

HEAD_DIM = 12
FACTORS = {"short_factor": (1.0, 1.5, 2.0, 2.5), "long_factor": (1.0, 4.0, 9.0, 16.0)}
KINDS = {
    "default": RopeParams(rotary_dim=8),
    "linear": RopeParams("linear", rotary_dim=8, factor=4.0),
    "dynamic": RopeParams("dynamic", rotary_dim=8, factor=2.0, original_length=50),
    "yarn": RopeParams("yarn", rotary_dim=8, factor=4.0, original_length=50, attention_factor=1.1),
    "llama3": RopeParams("llama3", rotary_dim=8, factor=8.0, original_length=50),
    "longrope": RopeParams("longrope", rotary_dim=8, original_length=50, **FACTORS),
}


def test_a_turn_written_out_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float64)
    rope = RopeParams(theta=100.0, rotary_dim=4, attention_factor=2.0)
    # Two pairs, (1, 3) and (2, 4); frequencies 1 and 100^-1/2; position 7.
    c0, s0, c1, s1 = math.cos(7), math.sin(7), math.cos(0.7), math.sin(0.7)
    wanted = [2 * (c0 - 3 * s0), 2 * (2 * c1 - 4 * s1), 2 * (3 * c0 + s0), 2 * (4 * c1 + 2 * s1), 5]
    assert apply_rope(x, torch.tensor([7]), rope)[0].tolist() == pytest.approx(wanted, abs=1e-14)
    # The same numbers side by side when interleaved: pairs (1, 2) and (3, 4).
    rope = replace(rope, interleaved=True)
    wanted = [2 * (c0 - 2 * s0), 2 * (2 * c0 + s0), 2 * (3 * c1 - 4 * s1), 2 * (4 * c1 + 3 * s1), 5]
    assert apply_rope(x, torch.tensor([7]), rope)[0].tolist() == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@given(start=st.integers(0, 4000), written=st.integers(0, 200), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_removing_undoes_applying(
    kind: str, dtype: torch.dtype, interleaved: bool, start: int, written: int, seed: int
) -> None:
    rope = replace(KINDS[kind], interleaved=interleaved, attention_factor=0.8)
    x = torch.randn(2, 3, 5, HEAD_DIM, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(start, start + 5)
    turned = apply_rope(x, positions, rope, start + written)
    back = remove_rope(turned, positions, rope, start + written)
    assert back.dtype == turned.dtype == dtype
    torch.testing.assert_close(back, x, rtol=0.0, atol=30 * torch.finfo(dtype).eps)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned[..., :8].norm(dim=-1), 0.8 * x[..., :8].norm(dim=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_distance_of_two_positions_counts(kind: str) -> None:
    q, k = torch.randn(2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def score(at: int, by: int) -> float:
        rope = KINDS[kind]
        a, b = (apply_rope(x, torch.tensor([p]), rope, 60) for x, p in ((q, at), (k, at + by)))
        return float((a * b).sum())

    assert score(3, 20) == pytest.approx(score(30, 20), abs=1e-12)
    assert score(3, 20) != pytest.approx(score(3, 21), abs=1e-3)


def test_positions_may_come_in_any_order_and_grow() -> None:
    rope, x = KINDS["default"], torch.randn(4, HEAD_DIM, dtype=torch.float64)
    first = apply_rope(x, torch.tensor([3, 0, 2, 2]), rope)
    apply_rope(x, torch.tensor([9000, 1, 2, 3]), rope)
    for row, position in enumerate([3, 0, 2, 2]):
        alone = apply_rope(x[row : row + 1], torch.tensor([position]), rope)
        assert torch.equal(first[row : row + 1], alone)
    assert apply_rope(x[:0], torch.empty(0, dtype=torch.int64), rope).shape == (0, HEAD_DIM)


def test_half_precision_keys_are_refused() -> None:
    for turn in (apply_rope, remove_rope):
        with pytest.raises(InputError, match="bfloat16; convert the keys"):
            turn(torch.ones(1, 8, dtype=torch.bfloat16), torch.tensor([0]), KINDS["default"])


@pytest.mark.parametrize("kind", KINDS)
@given(a=st.integers(0, 200), b=st.integers(0, 200))
@settings(deadline=None)
def test_a_regime_is_a_length_with_the_same_frequencies(kind: str, a: int, b: int) -> None:
    rope = KINDS[kind]
    of_a, of_b = rope.inverse_frequencies(a), rope.inverse_frequencies(b)
    assert (rope.regime(a) == rope.regime(b)) == np.array_equal(of_a, of_b)
    assert np.array_equal(rope.inverse_frequencies(rope.regime(a)), of_a)
    assert rope.length_dependent or rope.regime(a) == rope.regime(b)


def test_written_length_refuses_a_change_of_frequencies() -> None:
    dynamic, long = KINDS["dynamic"], KINDS["longrope"]
    assert written_length(dynamic, [10, 20, 50]) == 50
    assert written_length(long, [51, 400]) == 400
    assert written_length(KINDS["yarn"], [10, 4000]) == 4000
    assert written_length(dynamic, []) == 0
    for rope, lengths in ((dynamic, [50, 51]), (dynamic, [60, 61]), (long, [50, 51])):
        with pytest.raises(MismatchError, match=f"across a change of {rope.kind} RoPE"):
            written_length(rope, lengths)


def test_a_table_holds_the_angles_of_its_positions() -> None:
    rope = replace(KINDS["llama3"], attention_factor=1.7, interleaved=True)
    table = rope_table(rope, 40)
    angle = 33 * rope.inverse_frequencies()
    assert (table.num_positions, table.rotary_dim, table.scale) == (40, 8, 1.7)
    assert table.interleaved
    np.testing.assert_allclose(table.cos[33] + 1j * table.sin[33], np.exp(1j * angle), atol=1e-15)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"kind": "alibi"}, "'alibi' is not known; use one of default"),
        ({"rotary_dim": 7}, "even and not negative, got 7"),
        ({"rotary_dim": -2}, "even and not negative, got -2"),
        ({"kind": "longrope", "rotary_dim": 8}, "needs 4 values of short_factor"),
        (
            {"kind": "longrope", "rotary_dim": 8, "short_factor": (1.0,) * 4},
            "needs 4 values of long_factor",
        ),
    ],
)
def test_impossible_parameters_are_refused(entries: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RopeParams(**entries)
