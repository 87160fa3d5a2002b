"""What is vLLM's own: its pool's layout, its refusals, and a source that is an engine too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from connector_cases import Ask, mapped_end, require, require_status
from connector_world import World

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.errors import KvMapError, MismatchError
from trtllm_kvmap.inject.connector.blocks import Offer
from trtllm_kvmap.inject.hf_cache import view_pool as view_hf_pool
from trtllm_kvmap.tiny import model_folder


def test_vllm_reads_what_vllm_maps(engines: Callable, world: World) -> None:
    """Source and target both engines, and the target keeps its own exact KV of an earlier turn."""
    from vllm_blocks import EXPORTS

    ids = world.prompt(40, 200)
    engines("source").export(ids, "read by the source")
    exported = EXPORTS.take("read by the source")
    theirs = view_hf_pool(prefill(world.source, ids).cache)
    for mine, views in ((exported.keys, theirs.keys), (exported.values, theirs.values)):
        torch.testing.assert_close(mine, torch.stack(views)[:, 0], rtol=0, atol=2e-5)

    host, own = engines("roomy"), 50
    host.export(ids[:own], "the target's own")
    kept = EXPORTS.take("the target's own")
    source = exported.as_source()
    for exact in (None, kept.as_exact(own)):
        spliced = own if exact else 0
        offer = Offer(world.identity(), tuple(ids), world.source.fingerprint, spliced)
        held = type(source)(source.pool, source.slots, source.rope_length, exact)
        (answer,) = host.run([Ask(ids, salt=world.blocks.offer(offer, held))])
        require(answer, world.expect(ids, 16, end=mapped_end(host, ids), spliced=spliced))
        require_status(answer, "applied", spliced=spliced)


@pytest.mark.parametrize("count", [60, 200])
def test_vllm_exports_a_prompt_that_was_read_in_chunks(
    count: int, engines: Callable, world: World
) -> None:
    """Of 48 tokens each; after the first, 60 tokens have all their blocks, but not all their KV."""
    from vllm_blocks import EXPORTS

    ids = world.prompt(41, 200)[:count]
    engines("narrow").export(ids, "in chunks")
    exported = EXPORTS.take("in chunks")
    theirs = view_hf_pool(prefill(world.target, ids).cache)
    for mine, views in ((exported.keys, theirs.keys), (exported.values, theirs.values)):
        torch.testing.assert_close(mine, torch.stack(views)[:, 0], rtol=0, atol=2e-5)


def test_vllm_that_reads_no_cache_says_so(engines: Callable, world: World) -> None:
    """prompt_logprobs make vLLM compute every token, whatever a connector offers."""
    host, ids = engines("roomy"), world.prompt(42)
    (answer,) = host.run([Ask(ids, salt=world.offer(ids))], prompt_logprobs=0)
    require(answer, world.native(ids, 16))
    require_status(answer, "fallback_reprefill", matched=0, computed=len(ids))
    assert "prompt_logprobs" in answer.status["reason"]


@pytest.mark.parametrize("tokens_per_block", [32, 64])
def test_views_of_vllms_pool_are_proven_before_use(
    tokens_per_block: int, say_which_vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtllm_kvmap.inject.vllm import layout

    caches = {f"model.layers.{n}.attn": torch.zeros(4, 2, tokens_per_block, 64) for n in (10, 9)}
    pool = layout.view_pool(caches)
    assert pool.kv_shape == (2, 2, 32)
    assert pool.keys[0].data_ptr() == caches["model.layers.9.attn"].data_ptr()
    assert layout.is_proven(pool, "vec")

    def as_nominal(caches: dict) -> layout.KvPool:
        (cache,) = caches.values()
        return layout.KvPool((cache[..., :32],), (cache[..., 32:],))

    monkeypatch.setattr(layout, "view_pool", as_nominal)
    assert not layout.is_proven(pool, "vec")


def refuse_to_start(model: str, *, policy: str = "recompute", **settings: object) -> str:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm_host import VllmHost, connector

    with pytest.raises(KvMapError) as refusal:
        VllmHost(model_folder(model), connector(policy, **settings))
    ensure_kv_transfer_shutdown()  # vLLM keeps the connector of an engine that did not start
    return str(refusal.value)


def test_vllm_does_not_start_with_what_cannot_be_mapped(engines: Callable, world: World) -> None:
    from vllm_host import VllmHost, connector, target_settings

    settings = target_settings(world.path)
    engines("roomy")
    with pytest.raises(KvMapError, match="serves another engine"):
        VllmHost(model_folder("tiny-m"), connector(**settings))
    engines(None)
    sentences = (
        (refuse_to_start("tiny-m", policy="fail", **settings), "kv_load_failure_policy"),
        (refuse_to_start("tiny-x", **settings), "fitted for another target"),
        (refuse_to_start("tiny-m", **{**settings, "allow_unproven": False}), "no evidence"),
        (refuse_to_start("tiny-m", **{**settings, "blocks": "vllm_blocks:NONE"}), "imported"),
        (refuse_to_start("tiny-m", **settings, colour="red"), "no setting colour"),
        (refuse_to_start("tiny-m", blocks="vllm_blocks:BLOCKS"), "kvmap and blocks together"),
    )
    for sentence, expected in sentences:
        assert expected in sentence, sentence


def test_a_wrong_pool_is_refused(say_which_vllm: None) -> None:
    from trtllm_kvmap.inject.vllm.layout import view_pool

    for cache in (torch.zeros(2, 4, 2, 32, 64), torch.zeros(4, 2, 64, 64).transpose(1, 2)):
        with pytest.raises(MismatchError, match=r"model\.layers\.0"):
            view_pool({"model.layers.0.attn": cache})
    with pytest.raises(MismatchError, match="one number"):
        view_pool({"model.layers.0.experts.1": torch.zeros(4, 2, 32, 64)})
