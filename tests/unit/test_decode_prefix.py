"""Two chat templates over one tokenizer: the common prefix is handed over, the rest computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from handmade_maps import copy_map
from hypothesis import given
from hypothesis import strategies as st

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.prefix import common_prefix, plan_shared_prefix
from trtllm_kvmap.inject.hf_cache import view_pool

SHORT_LISTS = st.lists(st.integers(0, 2), max_size=6)

# The first template only marks the end of a turn; the second says whose turn it is.
PLAIN = "<bos>{% for m in messages %} {{ m.content }} end{% endfor %}"
MARKED = (
    "<bos>{% for m in messages %}"
    "{% if m.role == 'user' %} {{ m.content }} end{% else %} reply {{ m.content }} done{% endif %}"
    "{% endfor %}"
)
NUMBERS = [f"n{number}" for number in range(40)]
WORDS = ["<pad>", "<bos>", "end", "reply", "done", *NUMBERS]
MESSAGES = [
    {"role": "user", "content": " ".join(NUMBERS)},
    {"role": "assistant", "content": "n3 n1 n4"},
    {"role": "user", "content": "n1 n5 n9"},
]


@given(SHORT_LISTS, SHORT_LISTS)
def test_the_common_prefix_is_the_longest(first: list[int], second: list[int]) -> None:
    length = common_prefix(first, second)
    assert first[:length] == second[:length]
    assert first[: length + 1] != second[: length + 1] or length == max(len(first), len(second))


@given(SHORT_LISTS, SHORT_LISTS, st.integers(0, 3), st.integers(0, 3))
def test_nothing_beyond_the_common_prefix_is_mapped(
    source: list[int], target: list[int], first_tokens: int, repair_window: int
) -> None:
    plan = plan_shared_prefix(
        source, target, first_tokens=first_tokens, repair_window=repair_window
    )
    assert plan.num_tokens == len(target)
    assert not plan.mapped or plan.mapped.stop <= common_prefix(source, target)
    assert not target or plan.repaired


def test_two_templates_share_their_longest_prefix(random_model: Callable) -> None:
    """The target goes on in its own words; only what both have read alike comes from the source."""
    source, target = (random_model(seed=seed, words=WORDS) for seed in (1, 0))
    ids = {}
    for name, loaded, template in (("source", source, PLAIN), ("target", target, MARKED)):
        text = loaded.tokenizer.apply_chat_template(
            MESSAGES, chat_template=template, tokenize=False
        )
        ids[name] = loaded.tokenizer(text).input_ids
    shared = common_prefix(ids["source"], ids["target"])
    assert shared == len(["<bos>", *NUMBERS, "end"])
    bridge = KvBridge(copy_map(source, target), source=source, target=target)
    plan = plan_shared_prefix(ids["source"], ids["target"], repair_window=4)
    assert plan.mapped == range(1, shared)
    source_cache = prefill(source, ids["source"]).cache
    handoff = bridge.hand_over(source_cache, ids["target"], plan)

    mapped = view_pool(handoff.cache)
    for layer, keys in enumerate(view_pool(source_cache).keys):
        assert torch.equal(mapped.keys[layer][:, :, 1:shared], keys[:, :, 1:shared])
    # With nothing shared the target reads its whole prompt itself, and needs nothing mapped.
    alone = bridge.hand_over(
        source_cache, ids["target"], plan_shared_prefix([], ids["target"], repair_window=4)
    )
    native = prefill(target, ids["target"]).logits[-1]
    torch.testing.assert_close(alone.logits, native, rtol=0, atol=2e-5)
    assert (handoff.logits - native).abs().max() > 1e-3
