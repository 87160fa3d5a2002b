"""One pretrained model: its RoPE, its own cache put back, and a hand-over to itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from handmade_maps import copy_map
from stdlib_text import DOCSTRINGS
from streams import require_equal_streams
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate, near_ties
from trtllm_kvmap.decode.prefill import Prefill, prefill
from trtllm_kvmap.evaluate.metrics import leading_agreement
from trtllm_kvmap.inject.hf_cache import fork, make_cache, put_span, take_span, view_pool
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.rotary import apply_rope, remove_rope
from trtllm_kvmap.spec.plan import plan_handoff

pytestmark = pytest.mark.real
CONTEXT, STEPS = 256, 200
# Logits of one position differ by about 5e-5 between two ways of cutting the prompt into passes.
MARGIN = 1e-3


@pytest.fixture(scope="module")
def prompt(smollm2: LoadedModel) -> list[int]:
    return smollm2.tokenise(DOCSTRINGS["heapq"])[:CONTEXT]


@pytest.fixture(scope="module")
def read(smollm2: LoadedModel, prompt: list[int]) -> Prefill:
    return prefill(smollm2, prompt, logits_to_keep=1)


@pytest.fixture(scope="module")
def native(smollm2: LoadedModel, read: Prefill) -> list[int]:
    """What the model decodes from its own cache."""
    return generate(smollm2, fork(read.cache), read.logits[-1], STEPS)


@pytest.fixture(scope="module")
def plain(smollm2: LoadedModel, prompt: list[int]) -> list[int]:
    """What transformers itself generates."""
    ids = smollm2.model.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False)
    assert ids.shape[1] == CONTEXT + STEPS, "the model ended its text early: give another prompt"
    return ids[0, CONTEXT:].tolist()


@pytest.fixture(scope="module")
def require_plain(
    smollm2: LoadedModel, prompt: list[int], plain: list[int], summarise: Callable[[str], None]
) -> Callable[[str, list[int]], None]:
    """``require_plain(name, tokens)``: they are those of ``plain``, or part from it at a near-tie.
    How far they agree goes to the summary.
    """
    # What each token was chosen from, [200, vocab_size].
    logits = prefill(smollm2, prompt + plain[:-1], logits_to_keep=STEPS).logits
    summarise(f"near-ties within {MARGIN} in {STEPS} greedy tokens: {near_ties(logits, MARGIN)}")

    def require(name: str, mine: list[int]) -> None:
        require_equal_streams(mine, plain, logits, margin=MARGIN)
        summarise(f"{name}: {leading_agreement(mine, plain)} of {STEPS} greedy tokens are equal")

    return require


def test_the_converted_model_knows_what_the_original_knows(smollm2: LoadedModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = smollm2.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=False
    )
    asked = prefill(smollm2, smollm2.tokenise(text), logits_to_keep=1)
    answer = smollm2.tokenizer.decode(generate(smollm2, asked.cache, asked.logits[-1], 16))
    assert "Paris" in answer


def test_rope_is_transformers_own_to_the_last_position(smollm2: LoadedModel) -> None:
    rope, rotary = smollm2.spec.rope, smollm2.model.base_model.rotary_emb
    positions = torch.arange(smollm2.spec.max_positions)
    x = torch.randn(1, 1, len(positions), 64, generator=torch.Generator().manual_seed(0))
    _, theirs = apply_rotary_pos_emb(x, x, *rotary(x, positions[None]))
    frequencies = torch.from_numpy(rope.inverse_frequencies())
    torch.testing.assert_close(frequencies, rotary.inv_freq.double(), rtol=1e-6, atol=0)
    # Their frequencies and angles are float32: a relative error of some 2^-24 of each angle.
    allowed = 8 * (positions + 1) * 2.0**-24 * x.abs().max()
    mine = apply_rope(x.double(), positions, rope)
    assert bool(((mine - theirs).abs().amax(-1) < allowed).all())
    back = remove_rope(theirs.double(), positions, rope)
    assert bool(((back - x).abs().amax(-1) < allowed).all())


def test_unrotated_keys_are_what_the_projections_gave(
    smollm2: LoadedModel, prompt: list[int]
) -> None:
    """In every layer: the cached key without its rotation is the output of k_proj."""
    projected: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _m, _i, out: projected.append(out[0]))
        for layer in smollm2.model.base_model.layers
    ]
    cache = prefill(smollm2, prompt, logits_to_keep=1).cache
    for hook in hooks:
        hook.remove()
    assert len(projected) == smollm2.spec.num_layers
    for keys, wanted in zip(view_pool(cache).keys, projected, strict=True):
        found = remove_rope(keys[0].double(), torch.arange(CONTEXT), smollm2.spec.rope)
        heads = wanted.unflatten(-1, (smollm2.spec.num_kv_heads, -1)).transpose(0, 1).double()
        torch.testing.assert_close(found, heads, rtol=0, atol=1e-4 * float(heads.abs().max()))


def test_reinjection_is_exact(smollm2: LoadedModel, read: Prefill, native: list[int]) -> None:
    """The model's own cache, taken out and put into a new one, decodes the same tokens."""
    taken = take_span(read.cache, range(CONTEXT))
    cache = make_cache(smollm2.spec, CONTEXT)
    put_span(cache, 0, taken)
    back, own = (view_pool(c) for c in (cache, read.cache))
    assert all(map(torch.equal, back.keys + back.values, own.keys + own.values))
    assert generate(smollm2, cache, read.logits[-1], STEPS) == native


def test_generation_is_transformers_own(
    native: list[int], require_plain: Callable[[str, list[int]], None]
) -> None:
    require_plain("own cache", native)


@pytest.mark.parametrize("matrices", [False, True], ids=["copied", "multiplied"])
def test_identity_handover_decodes_what_the_model_alone_decodes(
    matrices: bool,
    smollm2: LoadedModel,
    read: Prefill,
    prompt: list[int],
    require_plain: Callable[[str, list[int]], None],
) -> None:
    """A map of the model to itself: bytes copied, or un-rotated, times one, and rotated again."""
    kvmap = copy_map(smollm2, smollm2)
    if matrices:
        kvmap = with_identity_matrices(kvmap)
    bridge = KvBridge(kvmap, source=smollm2, target=smollm2)
    handoff = bridge.hand_over(read.cache, prompt, plan_handoff(CONTEXT, repair_window=32))
    mine = generate(smollm2, handoff.cache, handoff.logits, STEPS)
    require_plain(f"identity, {'multiplied' if matrices else 'copied'}", mine)


def with_identity_matrices(kvmap: KvMap) -> KvMap:
    size = kvmap.target.head_dim
    groups = tuple(
        HeadGroup(g.field, g.layer, (head,), (s,), torch.eye(size), torch.zeros(size))
        for g in kvmap.groups
        for head, s in zip(g.heads, g.slices, strict=True)
    )
    return replace(kvmap, scope="slice", groups=groups)
