"""Speculation from a handed-over cache: what comes out is what the verifier alone would say."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from goodness import require_distribution
from handmade_maps import copy_map, random_map
from random_models import available_architectures
from streams import require_equal_streams

from trtllm_kvmap.decode.bridge import KvBridge
from trtllm_kvmap.decode.generate import generate
from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.sampling import distribution
from trtllm_kvmap.decode.speculation.draft_length import DraftLength
from trtllm_kvmap.decode.speculation.speculate import Speculation, speculate
from trtllm_kvmap.errors import InputError, MismatchError
from trtllm_kvmap.inject.hf_cache import HfCache, fork, num_entries, view_pool, written_lengths
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.spec.plan import plan_handoff

NEW = 60


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 60, shape, generator=torch.Generator().manual_seed(seed))


def stacked(cache: HfCache) -> torch.Tensor:
    """The whole cache, [2, layers, batch, heads, entries, head_dim]."""
    pool = view_pool(cache)
    return torch.stack([torch.stack(pool.keys), torch.stack(pool.values)])


def nearly(loaded: LoadedModel, noise: float = 0.05) -> LoadedModel:
    """Another model that says the same most of the time: every matrix disturbed a little."""
    model = copy.deepcopy(loaded.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter += noise * parameter.std() * drawn
    return LoadedModel("nearly", model, loaded.tokenizer, loaded.spec)


def read_alone(loaded: LoadedModel, cache: HfCache, logits: torch.Tensor, stream: list[int]):
    """The logits each token of ``stream`` is chosen from, [len(stream), vocab_size], and the cache
    with all of them but the last.
    """
    if len(stream) == 1:
        return logits[None], fork(cache)
    seen = prefill(loaded, stream[:-1], fork(cache))
    return torch.cat([logits[None], seen.logits]), seen.cache


def require_caches_hold_what_was_committed(
    result: Speculation, row: int, draft: HfCache, verifier: HfCache
) -> None:
    """Row ``row`` of both caches, against caches [1] that read the same tokens in one pass."""
    for mine, expected in ((result.draft_cache, draft), (result.verifier_cache, verifier)):
        kept = result.attention_mask[row].bool()
        assert num_entries(mine) == len(kept)
        whole = stacked(mine)[:, :, row]
        torch.testing.assert_close(
            whole[..., kept, :], stacked(expected)[:, :, 0], rtol=0, atol=5e-5
        )
        assert not whole[..., ~kept, :].any(), "a pad was written"


# --- Greedy: the verifier's own stream -----------------------------------------------------------


@pytest.mark.parametrize("architecture", available_architectures())
def test_greedy_is_what_the_verifier_decodes_from_the_same_mapped_cache(
    architecture: str, random_model: Callable
) -> None:
    verifier = random_model(architecture)
    draft = nearly(verifier)
    bridge = KvBridge(copy_map(draft, verifier), source=draft, target=verifier)
    ids = tokens(40)
    read = prefill(draft, ids)
    handoff = bridge.hand_over(read.cache, ids, plan_handoff(40, repair_window=8))
    before = stacked(read.cache).clone(), stacked(handoff.cache).clone()
    result = speculate(
        draft,
        verifier,
        read.cache,
        handoff.cache,
        handoff.logits,
        NEW,
        draft_length=DraftLength(confidence=0.01),  # random models are never surer
    )
    assert torch.equal(stacked(read.cache), before[0]), "the draft's cache was changed"
    assert torch.equal(stacked(handoff.cache), before[1]), "the verifier's cache was changed"

    alone = generate(verifier, fork(handoff.cache), handoff.logits, NEW)
    chosen_from, _ = read_alone(verifier, handoff.cache, handoff.logits, alone)
    require_equal_streams(result.rows[0], alone, chosen_from)
    assert len(set(alone)) > 3, "a stream of one token proves nothing"
    assert 0.1 < result.acceptance_rate < 1, "only one of two paths was taken"
    assert result.verifier_steps < NEW - 1
    (stream,) = result.rows
    require_caches_hold_what_was_committed(
        result,
        0,
        prefill(draft, [*ids.tolist(), *stream[:-1]]).cache,
        read_alone(verifier, handoff.cache, handoff.logits, stream)[1],
    )


def test_models_of_unequal_shape_that_agree_on_nothing(random_model: Callable) -> None:
    draft = random_model("llama", layers=3, kv_heads=4, seed=1)
    verifier = random_model("qwen3", head_dim=32)
    bridge = KvBridge(random_map(draft, verifier), source=draft, target=verifier)
    ids = tokens(40)
    read = prefill(draft, ids)
    handoff = bridge.hand_over(read.cache, ids, plan_handoff(40, repair_window=8))
    never_stop = DraftLength(confidence=0.0)
    result = speculate(
        draft, verifier, read.cache, handoff.cache, handoff.logits, 30, draft_length=never_stop
    )
    alone = generate(verifier, fork(handoff.cache), handoff.logits, 30)
    chosen_from, _ = read_alone(verifier, handoff.cache, handoff.logits, alone)
    require_equal_streams(result.rows[0], alone, chosen_from)
    assert result.acceptance_rate < 0.2
    assert result.proposed >= 4 * (result.row_steps - 3), "blocks shrink to 4, and no further"


@pytest.mark.parametrize(("length", "steps"), [(4, 8), (8, 5), (13, 3), (24, 2)])
def test_full_agreement_takes_whole_blocks(length: int, steps: int, random_model: Callable) -> None:
    """40 tokens after the first, length + 1 by each pass of the verifier."""
    loaded = random_model()
    read = prefill(loaded, tokens(40))
    fixed = DraftLength(length, length, confidence=0.0)
    result = speculate(
        loaded, loaded, read.cache, read.cache, read.logits[-1], 41, draft_length=fixed
    )
    assert (result.verifier_steps, result.row_steps) == (steps, steps)
    assert (result.acceptance_rate, result.proposed) == (1.0, 40 - steps)
    assert result.acceptance_length == result.tokens_per_verifier_step == 40 / steps


def test_blocks_grow_with_agreement(random_model: Callable) -> None:
    """4, 8, 16, 24 and again 24 proposals and their bonus tokens: 81 tokens in five passes."""
    loaded = random_model()
    read = prefill(loaded, tokens(40))
    policy = DraftLength(confidence=0.0)
    result = speculate(
        loaded, loaded, read.cache, read.cache, read.logits[-1], 82, draft_length=policy
    )
    assert (result.verifier_steps, result.proposed) == (5, 76)


def test_an_unsure_draft_stops(random_model: Callable) -> None:
    """A block ends where the product of its probabilities falls too low, counted by hand."""
    loaded = random_model()
    read = prefill(loaded, tokens(40))
    stream = generate(loaded, fork(read.cache), read.logits[-1], NEW)
    chosen_from, _ = read_alone(loaded, read.cache, read.logits[-1], stream)
    best = chosen_from.softmax(-1).amax(-1)
    wanted = float(best[1:].median()) ** 2
    policy = DraftLength(24, 24, confidence=wanted)
    result = speculate(
        loaded, loaded, read.cache, read.cache, read.logits[-1], NEW, draft_length=policy
    )
    proposed = steps = 0
    place = 1
    while place < NEW:  # each step: proposals while they stand a chance, then one of the verifier's
        block = 0
        while block < min(24, NEW - place - 1) and best[place : place + block + 1].prod() >= wanted:
            block += 1
        proposed, steps, place = proposed + block, steps + 1, place + block + 1
    assert steps < proposed < 4 * steps, "blocks of one length prove nothing"
    assert (result.proposed, result.verifier_steps) == (proposed, steps)
    assert result.rows == [stream]


# --- Batches -------------------------------------------------------------------------------------

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


def test_an_end_token_inside_an_accepted_block_ends_the_row(random_model: Callable) -> None:
    """The draft is the verifier, so the whole block would be accepted; the end token cuts it."""
    loaded = random_model()
    ids = tokens(40)
    read = prefill(loaded, ids)
    free = generate(loaded, fork(read.cache), read.logits[-1], 30)
    end = free.index(free[6])
    fixed = DraftLength(24, 24, confidence=0.0)
    result = speculate(
        loaded,
        loaded,
        read.cache,
        read.cache,
        read.logits[-1],
        30,
        eos_token_ids={free[6]},
        draft_length=fixed,
    )
    assert result.rows == [free[: end + 1]]
    assert (result.verifier_steps, result.accepted) == (1, end)
    own = prefill(loaded, [*ids.tolist(), *free[:end]]).cache
    require_caches_hold_what_was_committed(result, 0, own, own)


def test_one_token_needs_no_draft(random_model: Callable) -> None:
    loaded = random_model()
    read = prefill(loaded, tokens(40))
    result = speculate(loaded, loaded, read.cache, read.cache, read.logits[-1], 1)
    assert result.rows == [[int(read.logits[-1].argmax())]]
    assert (result.verifier_steps, result.proposed, result.acceptance_rate) == (0, 0, 0.0)
    assert torch.equal(stacked(result.draft_cache), stacked(read.cache))


def test_generation_goes_on_from_both_caches(random_model: Callable) -> None:
    """Speculate, then let the verifier alone, then speculate again: one stream."""
    verifier = random_model()
    draft = nearly(verifier)
    ids = tokens(40)
    read, own = prefill(draft, ids), prefill(verifier, ids)
    whole = generate(verifier, fork(own.cache), own.logits[-1], 60)
    chosen_from, _ = read_alone(verifier, own.cache, own.logits[-1], whole)
    first = speculate(draft, verifier, read.cache, own.cache, own.logits[-1], 20)
    stream = list(first.rows[0])
    step = prefill(verifier, stream[-1:], first.verifier_cache)
    drafted = prefill(draft, stream[-1:], first.draft_cache)
    second = speculate(draft, verifier, drafted.cache, step.cache, step.logits[-1], 20)
    stream += second.rows[0]
    step = prefill(verifier, stream[-1:], second.verifier_cache)
    stream += generate(verifier, step.cache, step.logits[-1], 20)
    require_equal_streams(stream, whole, chosen_from)


# --- Sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_samples_have_the_verifiers_distribution(
    temperature: float, random_model: Callable
) -> None:
    """2,000 rows of one prompt. The first token, and the second whatever the first was, against the
    verifier's own probabilities by a chi-square; the draft is another model altogether.
    """
    verifier, draft = random_model(seed=0), random_model(seed=1)
    ids, draws = tokens(12), 2000
    own, read = prefill(verifier, ids), prefill(draft, ids)
    chances = distribution(own.logits[-1], temperature)
    every = torch.arange(verifier.spec.vocab_size)
    after = prefill(
        verifier, torch.cat([ids.expand(len(every), -1), every[:, None]], dim=-1), logits_to_keep=1
    ).logits[:, -1]
    second = chances @ distribution(after, temperature)

    many_own, many_read = (
        prefill(loaded, ids.expand(draws, -1), logits_to_keep=1) for loaded in (verifier, draft)
    )
    result = speculate(
        draft,
        verifier,
        many_read.cache,
        many_own.cache,
        many_own.logits[:, -1],
        3,
        temperature=temperature,
        generator=torch.Generator().manual_seed(5),
    )
    drawn = torch.tensor(result.rows)
    for place, expected in ((0, chances), (1, second)):
        counts = drawn[:, place].bincount(minlength=len(every))
        require_distribution(counts.tolist(), expected.tolist())
    q = distribution(read.logits[-1], temperature)
    assert (q - chances).abs().sum() > 0.2, "the two models must differ"
    assert 0.02 < result.acceptance_rate < 0.98
    assert result.proposed == draws, "a draft that samples does not stop unsure"


def test_a_long_sampled_answer_is_drawn_from_the_verifier(random_model: Callable) -> None:
    """Later tokens, whatever came before: each token's rank in the verifier's own cumulative
    distribution is uniform.
    """
    verifier = random_model()
    draft = nearly(verifier, 0.3)
    ids, draws, length = tokens(12), 60, 40
    own, read = (prefill(loaded, ids.expand(draws, -1)) for loaded in (verifier, draft))
    result = speculate(
        draft,
        verifier,
        read.cache,
        own.cache,
        own.logits[:, -1],
        length,
        temperature=1.0,
        generator=torch.Generator().manual_seed(6),
    )
    drawn = torch.tensor(result.rows)
    seen = prefill(verifier, drawn[:, :-1], fork(own.cache)).logits
    chances = distribution(torch.cat([own.logits[:, -1:], seen], dim=1), 1.0).double()
    upper = chances.cumsum(-1).gather(2, drawn[..., None])[..., 0]
    width = chances.gather(2, drawn[..., None])[..., 0]
    noise = torch.rand(upper.shape, generator=torch.Generator().manual_seed(8)).double()
    bins = ((upper - noise * width).clamp(0, 1 - 1e-9) * 20).long()
    require_distribution(bins.flatten().bincount(minlength=20).tolist(), [1 / 20] * 20)
    assert 0.2 < result.acceptance_rate < 0.95
    assert result.acceptance_length > 1.2


def test_equal_seeds_give_equal_samples(random_model: Callable) -> None:
    verifier = random_model()
    read = prefill(verifier, tokens(20))
    streams = [
        speculate(
            nearly(verifier),
            verifier,
            read.cache,
            read.cache,
            read.logits[-1],
            20,
            temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
        ).rows
        for seed in (1, 1, 2)
    ]
    assert streams[0] == streams[1] != streams[2]


def test_a_draft_with_padding_ids_proposes_none_of_them(random_model: Callable) -> None:
    """Models of one tokenizer may have vocabularies padded to different sizes."""
    verifier = random_model()
    model = copy.deepcopy(verifier.model)
    size = verifier.spec.vocab_size
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[size:] = 3 * model.lm_head.weight[:8]
    padded = LoadedModel("padded", model, verifier.tokenizer, verifier.spec)
    ids = tokens(40)
    read, own = prefill(padded, ids), prefill(verifier, ids)
    assert (prefill(padded, tokens(200)).logits.argmax(-1) >= size).any(), "they must tempt it"
    for temperature in (0.0, 0.7):
        result = speculate(
            padded,
            verifier,
            read.cache,
            own.cache,
            own.logits[-1],
            40,
            temperature=temperature,
            generator=torch.Generator().manual_seed(0),
            draft_length=DraftLength(confidence=0.0),
        )
        assert result.acceptance_rate == 1.0, "without padding ids the two are one model"


# --- Limits and RoPE -----------------------------------------------------------------------------

DYNAMIC = {"rope": {"rope_type": "dynamic", "factor": 4.0}, "max_positions": 32}
LONGROPE = {
    "rope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "max_positions": 128,
}
LENGTH_DEPENDENT = [pytest.param(DYNAMIC, id="dynamic"), pytest.param(LONGROPE, id="longrope")]


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_frequencies_change_where_plain_decoding_changes_them(
    options: dict, random_model: Callable
) -> None:
    """20 tokens of prompt and 40 new ones, over a change at 32."""
    verifier = random_model("llama", **options)
    ids = tokens(20)
    own = prefill(verifier, ids)
    alone = generate(verifier, fork(own.cache), own.logits[-1], 40)
    expected = fork(own.cache)
    chosen_from = [own.logits[-1]]
    prefill(verifier, ids)  # a short sequence: dynamic RoPE forgets the long one
    for token in alone[:-1]:
        chosen_from.append(prefill(verifier, [token], expected).logits[0])
    prefill(verifier, ids)
    result = speculate(
        verifier,
        verifier,
        own.cache,
        own.cache,
        own.logits[-1],
        40,
        draft_length=DraftLength(confidence=0.0),
    )
    require_equal_streams(result.rows[0], alone, torch.stack(chosen_from))
    torch.testing.assert_close(stacked(result.verifier_cache), stacked(expected), rtol=0, atol=5e-5)
    assert result.accepted > 0
    lengths = written_lengths(result.verifier_cache, range(59))
    assert lengths is not None
    assert {verifier.spec.rope.regime(n) for n in lengths} == {
        verifier.spec.rope.regime(n) for n in written_lengths(expected, range(59))
    }


@pytest.mark.parametrize("options", LENGTH_DEPENDENT)
def test_a_batch_whose_frequencies_would_change_is_refused(
    options: dict, random_model: Callable
) -> None:
    verifier, plain = random_model("llama", **options), random_model("llama")
    own, read = (prefill(loaded, tokens(2, 20)) for loaded in (verifier, plain))
    logits = own.logits[:, -1]
    with pytest.raises(MismatchError, match="Speculate on its rows one by one"):
        speculate(plain, verifier, read.cache, own.cache, logits, 13)
    with pytest.raises(MismatchError, match="Speculate on its rows one by one"):
        speculate(verifier, plain, own.cache, read.cache, logits, 13)
    short = speculate(plain, verifier, read.cache, own.cache, logits, 11)
    assert [len(row) for row in short.rows] == [11, 11]


def test_mistakes_are_refused_before_anything_runs(
    random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, small = random_model(), random_model(max_positions=64)
    read, less = prefill(loaded, tokens(20)), prefill(small, tokens(19))
    logits = read.logits[-1]
    same = prefill(small, tokens(20)).cache

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model ran")

    for model in (loaded, small):
        monkeypatch.setattr(model.model, "forward", never)
    with pytest.raises(InputError, match=r"1 sequences of 19 tokens, .* 1 of 20"):
        speculate(small, loaded, less.cache, read.cache, logits, 5)
    with pytest.raises(InputError, match="with logits for 2"):
        speculate(loaded, loaded, read.cache, read.cache, logits.expand(2, -1), 5)
    with pytest.raises(InputError, match=r"takes 70 positions; .* allows 64"):
        speculate(small, loaded, same, read.cache, logits, 50)
    with pytest.raises(InputError, match=r"takes 70 positions; .* allows 64"):
        speculate(loaded, small, read.cache, same, logits, 50)
    with pytest.raises(InputError, match="at least 1, got 0"):
        speculate(loaded, loaded, read.cache, read.cache, logits, 0)
    with pytest.raises(InputError, match="temperature must be 0"):
        speculate(loaded, loaded, read.cache, read.cache, logits, 5, temperature=-1.0)
    with pytest.raises(InputError, match=r"mask needs the shape \[1, 20\]"):
        speculate(
            loaded, loaded, read.cache, read.cache, logits, 5, attention_mask=torch.ones(1, 21)
        )
