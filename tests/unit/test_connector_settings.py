"""Salts, provenance, settings and start-up checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from handmade_maps import copy_map

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.errors import InputError, MismatchError, UnprovenError
from trtllm_kvmap.inject.connector import provenance
from trtllm_kvmap.inject.connector.checks import HostReport, refusals, require_host
from trtllm_kvmap.inject.connector.config import ConnectorConfig, import_object
from trtllm_kvmap.inject.connector.identity import HandoffIdentity
from trtllm_kvmap.inject.connector.provenance import Provenance
from trtllm_kvmap.spec.rope import RopeParams

WHO = HandoffIdentity("tenant", "conversation", "target", "digest", "1")


@pytest.fixture(scope="module")
def kvmap(random_model: Callable) -> KvMap:
    return copy_map(random_model(seed=1), random_model(seed=0))


def test_every_part_of_an_identity_changes_its_salt() -> None:
    others = [
        replace(WHO, **{field: f"{getattr(WHO, field)}x"})
        for field in ("tenant", "conversation", "target", "kvmap_digest", "handoff")
    ]
    shifted = replace(WHO, tenant="tenantc", conversation="onversation")
    salts = {who.salt for who in (WHO, *others, shifted, replace(WHO, tenant=""))}
    assert len(salts) == 8
    assert replace(WHO).salt == WHO.salt
    assert all(len(salt) == 64 for salt in salts)
    for field in ("conversation", "target", "kvmap_digest", "handoff"):
        with pytest.raises(InputError, match=field):
            replace(WHO, **{field: ""})


def test_a_forgotten_conversation_counts_as_approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "REMEMBERED", 2)
    record, tokens = Provenance(4), list(range(10))
    for salt in ("a", "b"):
        record.note(salt, tokens, 10, set())
    record.note("a", tokens[:4], 4, set())  # used again
    record.note("c", tokens, 10, set())
    assert [record.exact_tokens(salt, tokens) for salt in "abc"] == [8, 0, 8]


def test_a_block_is_exact_only_if_all_before_it_are() -> None:
    record, tokens = Provenance(4), list(range(16))
    record.note("s", tokens, 16, set())
    assert record.exact_tokens("s", tokens[:11]) == 8
    assert record.exact_tokens("s", [99, *tokens[1:]]) == 0
    assert record.exact_tokens("s", [*tokens[:4], 99, *tokens[5:]]) == 4
    first: set[bytes] = set()
    record.note("s", tokens[:8], 7, first)
    assert record.exact_tokens("s", tokens) == 4, "a block was mapped in part"
    record.note("s", tokens, 16, set())
    assert record.exact_tokens("s", tokens) == 4, "which of the two an engine keeps is unknown"
    record.retract("s", first)
    assert record.exact_tokens("s", tokens) == 16


def test_only_what_a_request_marked_itself_is_taken_back() -> None:
    record, tokens = Provenance(4), list(range(16))
    first: set[bytes] = set()
    second: set[bytes] = set()
    record.note("s", tokens, 4, first)
    record.note("s", tokens, 4, second)
    record.note("s", tokens, 4, second)  # once more, in a later step
    record.note("s", tokens, 16, set())  # each block was computed by the target once, too
    record.retract("s", second)
    assert record.exact_tokens("s", tokens) == 4, "the first request's blocks may be there still"
    record.retract("s", second)
    record.retract("another salt", {b"unknown"})
    assert record.exact_tokens("s", tokens) == 4
    record.retract("s", first)
    assert record.exact_tokens("s", tokens) == 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "got {}"),
        ({"kvmap": "f"}, "together"),
        ({"blocks": "m:n"}, "together"),
        ({"exports": "m:n", "colour": 1, "size": 2}, "no setting colour, size; it has"),
    ],
)
def test_settings_that_say_nothing_or_too_much_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as refusal:
        ConnectorConfig.of(settings)
    assert words in str(refusal.value)


def test_settings_name_a_map_and_objects(kvmap: KvMap, tmp_path: Any) -> None:
    path = tmp_path / "p.kvmap.safetensors"
    digest = kvmap.save(path)
    settings = {"kvmap": str(path), "blocks": "connector_engine:SOURCE"}
    with pytest.raises(UnprovenError):
        ConnectorConfig.of(settings).load_map()
    loaded, read = ConnectorConfig.of({**settings, "allow_unproven": True}).load_map()
    assert (read, loaded.target) == (digest, kvmap.target)
    assert import_object("connector_engine:SIZE") == 4
    for wrong in ("connector_engine", "connector_engine:NONE", "no_such_module:X", ":X", ""):
        with pytest.raises(InputError, match="module:name"):
            import_object(wrong)


def report(kvmap: KvMap, **changes: Any) -> HostReport:
    good = HostReport("A host", kvmap.target.kv_shape, tokens_per_block=32, cache_dtype="float16")
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_shape": (1, 2, 3)}, "give the map of this target"),
        ({"cache_dtype": "int8"}, "float8_e4m3fn"),
        ({"tensor_parallel": 2}, "make them equal"),
        ({"tensor_parallel": 2, "source_tensor_parallel": 2}, "other ranks"),
        ({"head_order_known": False}, "order"),
        ({"pipeline_parallel": 2}, "pipeline"),
        ({"beam_width": 4}, "beam"),
        ({"block_reuse": False}, "prefix caching"),
        ({"per_request_salt": False}, "cache salt"),
        ({"host_offload": True}, "offload"),
        ({"windows": (None, 512)}, "windows"),
        ({"layout_proven": False}, "read back"),
        ({"speculation": True}, "speculation"),
    ],
)
def test_a_host_that_would_be_wrong_is_refused(
    changes: dict[str, Any], words: str, kvmap: KvMap
) -> None:
    require_host(report(kvmap), kvmap)
    (sentence,) = refusals(report(kvmap, **changes), kvmap)
    assert words in sentence
    with pytest.raises(MismatchError, match=r"^A host cannot take mapped KV: .*\.$"):
        require_host(report(kvmap, **changes), kvmap)


def test_a_target_whose_rope_follows_the_length_is_refused(kvmap: KvMap) -> None:
    rope = RopeParams(kind="dynamic", rotary_dim=16, factor=2.0, original_length=64)
    changed = replace(kvmap, target=replace(kvmap.target, rope=rope))
    (sentence,) = refusals(report(kvmap), changed)
    assert "dynamic RoPE" in sentence
