"""The map as a file: it comes back as it was, and nothing that is wrong with it gets in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evidence_case import vouched, whole_evidence
from safetensors import safe_open

from trtllm_kvmap.artifact.container import (
    HEADER_KEY,
    read_container,
    read_content,
    write_container,
)
from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.kvmap import FORMAT_VERSION, KIND, KvMap
from trtllm_kvmap.artifact.native import SinkEntry, TokenTable
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.errors import (
    FormatError,
    MismatchError,
    NumericsError,
    UnavailableError,
    UnprovenError,
)
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.spec.slices import Slice

SOURCE = ModelSpec("s", "llama", 3, 4, 2, 8, 11, 64, RopeParams(rotary_dim=8))
LONG = RopeParams(
    "longrope",
    rotary_dim=4,
    original_length=32,
    short_factor=(1.0, 1.5),
    long_factor=(2.0, 3.0),
)
TARGET = ModelSpec("t", "phi3", 2, 2, 2, 4, 11, 128, LONG, dtype="bfloat16")
OWN = Slice("target", "key", 0, 1)


def make_map(**changes: Any) -> KvMap:
    """Two groups a layer and field, one of them reading the target's own layer 0."""
    g = torch.Generator().manual_seed(0)

    def group(field: str, layer: int, head: int) -> HeadGroup:
        slices = (Slice("source", field, 2, 1), Slice("source", field, 0, head))
        if field == "key" and head == 1:
            slices = (*slices, OWN)
        width = sum(4 if s.origin == "target" else 8 for s in slices)
        weight, bias = torch.randn(width, 4, generator=g), torch.randn(4, generator=g)
        return HeadGroup(field, layer, (head,), slices, weight, bias)

    fields: dict[str, Any] = {
        "source": SOURCE,
        "target": TARGET,
        "source_fingerprint": Fingerprint("c1", "w1", "t"),
        "target_fingerprint": Fingerprint("c2", "w2", "t"),
        "scope": "slice",
        "groups": tuple(
            group(field, layer, head)
            for layer in range(2)
            for field in ("key", "value")
            for head in range(2)
        ),
        "fitted": {"ridge": 0.01, "candidates": [{"n": 2, "loss": 1.5}]},
        "token_table": TokenTable(*torch.randn(2, 11, 2, 4, generator=g)),
        "sinks": (SinkEntry((1, 5, 7), *torch.randn(2, 2, 2, 3, 4, generator=g)),),
    }
    kvmap = vouched(KvMap(**{**fields, **changes}), whole_evidence(0.7))
    return replace(kvmap, **changes)


def copy_map() -> KvMap:
    groups = tuple(
        HeadGroup(f, layer, (0, 1), tuple(Slice("source", f, layer, h) for h in (0, 1)), None, None)
        for f in ("key", "value")
        for layer in range(3)
    )
    return make_map(
        target=replace(SOURCE, name="t"), groups=groups, scope="copy", token_table=None, sinks=()
    )


def second_map() -> KvMap:
    """Beside plain matrices: scaled weights, a low-rank group and a residual network."""
    plain = make_map().groups
    g = torch.Generator().manual_seed(1)
    low_rank = SecondTerm(
        torch.randn(16, 2, generator=g), torch.zeros(2), torch.randn(2, 4, generator=g), "identity"
    )
    scaled = replace(
        plain[2], weight=plain[2].weight.to(torch.float8_e4m3fn), weight_scale=torch.rand(4) + 0.5
    )
    groups = (
        replace(plain[0], weight=None, second=low_rank),
        plain[1],
        scaled,
        replace(plain[3], second=replace(low_rank, activation="silu")),
        *plain[4:],
    )
    return make_map(groups=groups)


def pieces(kvmap: KvMap) -> tuple[Any, list[torch.Tensor]]:
    """Everything but the tensors, and the tensors, in a form that compares."""
    held = [t for g in kvmap.groups for t in (g.weight, g.bias, g.weight_scale)]
    held += [t for g in kvmap.groups if g.second for t in astuple(g.second)[:3]]
    tensors = [t.float() for t in held if t is not None]
    if kvmap.token_table:
        tensors += [kvmap.token_table.keys, kvmap.token_table.values]
    tensors += [t for sink in kvmap.sinks for t in (sink.keys, sink.values)]
    groups = [(g.field, g.layer, g.heads, g.slices) for g in kvmap.groups]
    groups += [g.second.activation for g in kvmap.groups if g.second]
    plain = [
        getattr(kvmap, name)
        for name in (
            "source",
            "target",
            "source_fingerprint",
            "target_fingerprint",
            "scope",
            "fitted",
            "evidence",
        )
    ]
    return (plain, groups, [sink.token_ids for sink in kvmap.sinks]), tensors


@pytest.mark.parametrize("make", [make_map, copy_map, second_map])
def test_a_map_comes_back_as_it_was(make: Callable[[], KvMap], tmp_path: Path) -> None:
    path, kvmap = tmp_path / "a.kvmap.safetensors", make()
    digest = kvmap.save(path)
    found = KvMap.load(path)
    (plain, tensors), (wanted_plain, wanted_tensors) = pieces(found), pieces(kvmap)
    assert plain == wanted_plain
    assert len(tensors) == len(wanted_tensors)
    assert all(map(torch.equal, tensors, wanted_tensors))
    assert found.num_parameters == kvmap.num_parameters
    # What was read, written again, gives the same bytes.
    again = tmp_path / "b.kvmap.safetensors"
    assert found.save(again) == digest
    assert again.read_bytes() == path.read_bytes()


def test_only_a_map_with_more_than_matrices_needs_the_newer_version(tmp_path: Path) -> None:
    for make, version in ((make_map, 1), (copy_map, 1), (second_map, 2)):
        make().save(tmp_path / "map")
        with safe_open(tmp_path / "map", framework="pt") as file:
            assert json.loads(file.metadata()[HEADER_KEY])["version"] == version


def test_a_linear_second_term_multiplies_out() -> None:
    low_rank, _, scaled, network, *_ = second_map().groups
    x = torch.randn(5, 16)
    weight, bias = low_rank.linear()
    torch.testing.assert_close(
        x @ weight + bias, low_rank.bias + (x @ low_rank.second.down) @ low_rank.second.up
    )
    weight, bias = scaled.linear()
    torch.testing.assert_close(weight, scaled.weight.float() * scaled.weight_scale[None, :])
    with pytest.raises(UnavailableError, match="activation silu"):
        network.linear()


def test_equal_maps_give_equal_bytes_and_other_maps_other_digests(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    digest = make_map().save(one)
    assert make_map().save(two) == digest
    assert one.read_bytes() == two.read_bytes()
    assert make_map(evidence=None).save(two) != digest


@pytest.mark.parametrize("make", [make_map, copy_map, second_map])
def test_the_map_digest_is_that_of_the_file_that_fit_wrote(
    make: Callable[[], KvMap], tmp_path: Path
) -> None:
    """Whatever was added to the map since; and of every number in it."""
    bare = replace(make(), evidence=None)
    written = bare.save(tmp_path / "bare")
    judged = bare.with_evidence({"a": 1}).with_guard({"b": 2})
    digest = judged.save(tmp_path / "judged")
    for kvmap in (bare, judged, KvMap.load(tmp_path / "judged", allow_unproven=True)):
        assert kvmap.map_digest() == written != digest
    assert read_content(tmp_path / "judged", KIND, FORMAT_VERSION)["map_digest"] == written
    assert "map_digest" not in read_content(tmp_path / "bare", KIND, FORMAT_VERSION)
    assert replace(bare, fitted={}).map_digest() != written
    sink = bare.sinks[0] if bare.sinks else None
    if sink is not None:
        sink.values[-1, -1, -1, -1] += 1
        assert bare.map_digest() != written


def test_a_map_without_evidence_is_only_loaded_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "map"
    make_map(evidence=None).save(path)
    with pytest.raises(UnprovenError, match="carries no evidence"):
        KvMap.load(path)
    kvmap = KvMap.load(path, allow_unproven=True)
    vouched(kvmap).save(path)
    assert KvMap.load(path).evidence == vouched(kvmap).evidence


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["weight", "bias", "token_table", "sink"])
def test_numbers_that_are_none_are_refused(value: float, where: str, tmp_path: Path) -> None:
    kvmap = make_map()
    tensor = {
        "weight": kvmap.groups[3].weight,
        "bias": kvmap.groups[3].bias,
        "token_table": kvmap.token_table.values,
        "sink": kvmap.sinks[0].keys,
    }[where]
    tensor.view(-1)[-1] = value
    kvmap.save(tmp_path / "map")
    with pytest.raises(NumericsError, match=f"{where}.* holds NaN or infinity"):
        KvMap.load(tmp_path / "map")


def test_a_file_of_moments_is_no_map(tmp_path: Path) -> None:
    write_container(tmp_path / "file", "moments", FORMAT_VERSION, {}, {})
    with pytest.raises(FormatError, match="is a 'moments' file; a 'kvmap' file is needed"):
        KvMap.load(tmp_path / "file")


@pytest.mark.parametrize("missing", ["groups", "target", "sinks", "evidence", "source_fingerprint"])
def test_an_incomplete_header_is_refused(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "map"
    make_map().save(path)
    content, tensors = read_container(path, "kvmap", FORMAT_VERSION)
    del content[missing]
    write_container(path, "kvmap", FORMAT_VERSION, content, tensors)
    with pytest.raises(FormatError, match=f"incomplete .*{missing}"):
        KvMap.load(path)


@pytest.mark.parametrize(
    "missing", ["group.0.weight", "group.0.bias", "sink.0.keys", "token_table.values"]
)
def test_a_missing_tensor_is_refused(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "map"
    make_map().save(path)
    content, tensors = read_container(path, "kvmap", FORMAT_VERSION)
    del tensors[missing]
    write_container(path, "kvmap", FORMAT_VERSION, content, tensors)
    with pytest.raises((FormatError, MismatchError)):
        KvMap.load(path)


def test_another_model_is_named_by_what_differs() -> None:
    kvmap = make_map()
    source, target = kvmap.source_fingerprint, kvmap.target_fingerprint
    kvmap.require_models(source, target)
    with pytest.raises(MismatchError, match="another source model: weights differ"):
        kvmap.require_models(replace(source, weights="x"), target)
    with pytest.raises(MismatchError, match="another target model: config and tokenizer differ"):
        kvmap.require_models(source, replace(target, config="x", tokenizer="x"))


def edited(index: int, **changes: Any) -> Callable[[KvMap], dict[str, Any]]:
    def edit(kvmap: KvMap) -> dict[str, Any]:
        groups = list(kvmap.groups)
        groups[index] = replace(groups[index], **changes)
        return {"groups": tuple(groups)}

    return edit


def reading(*slices: Slice) -> Callable[[KvMap], dict[str, Any]]:
    return edited(0, slices=slices)


def second(down: int = 16, up: int = 4, activation: str = "silu") -> SecondTerm:
    return SecondTerm(torch.zeros(down, 2), torch.zeros(2), torch.zeros(2, up), activation)


HERE = Slice("source", "key", 0, 0)
UNSOUND: dict[str, tuple[Callable[[KvMap], dict[str, Any]], str]] = {
    "a head twice": (edited(1, heads=(0,)), "covers 7 of 8, with 1 twice"),
    "a layer beyond": (edited(0, layer=2), "must cover each of the target's 2 layers x 2 heads"),
    "a group too few": (lambda m: {"groups": m.groups[1:]}, "covers 7 of 8"),
    "no such source layer": (reading(HERE, replace(HERE, layer=3)), "may read 3 layers x 2 heads"),
    "no such source head": (reading(HERE, replace(HERE, head=2)), "may read 3 layers x 2 heads"),
    "no such field": (reading(HERE, replace(HERE, field="query")), "field='query'"),
    "no such origin": (reading(HERE, replace(HERE, origin="draft")), "0 layers x 0 heads"),
    "a deep own layer": (reading(HERE, replace(OWN, layer=1)), "1 layers x 2 heads of the target"),
    "a slice too few": (reading(HERE), r"weight of \(8, 4\)"),
    "a weight turned": (edited(0, weight=torch.zeros(4, 16)), r"got \(4, 16\)"),
    "a bias too short": (edited(0, bias=torch.zeros(3)), r"bias of \(4,\)"),
    "a bias missing": (edited(0, bias=None), r"lacks its bias of \(4,\)"),
    "no weight and no second term": (edited(0, weight=None), "nor a second term"),
    "a scale without float8": (edited(0, weight_scale=torch.ones(4)), "only there"),
    "float8 without a scale": (
        edited(0, weight=torch.zeros(16, 4).to(torch.float8_e4m3fn)),
        "needs weight_scale",
    ),
    "an unknown activation": (edited(0, second=second(activation="relu")), "use one of identity"),
    "a second term too narrow": (edited(0, second=second(down=15)), r"needs down float32 \(16, 2"),
    "a second term turned": (edited(0, second=second(up=3)), r"needs up float32 \(2, 4"),
    "a copy of a wider head": (edited(0, weight=None, bias=None), "A copy needs one slice"),
    "no token table": (lambda _: {"token_table": None}, "no token table"),
    "a token table too short": (
        lambda _: {"token_table": TokenTable(*torch.zeros(2, 10, 2, 4))},
        r"token table must be \(11, 2, 4\)",
    ),
    "a sink too short": (
        lambda _: {"sinks": (SinkEntry((1, 2), *torch.zeros(2, 2, 2, 1, 4)),)},
        r"sink of tokens \(1, 2\) must be \(2, 2, 2, 4\)",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_map_cannot_be_made(name: str) -> None:
    change, message = UNSOUND[name]
    with pytest.raises((FormatError, MismatchError), match=message):
        make_map(**change(make_map()))


def test_the_sink_of_the_longest_shared_prefix_is_found() -> None:
    short = SinkEntry((1,), *torch.zeros(2, 2, 2, 1, 4))
    kvmap = make_map(sinks=(short, *make_map().sinks))
    found = kvmap.sink_for([1, 5, 9, 9])
    assert found.token_ids == (1, 5)
    assert torch.equal(found.keys, kvmap.sinks[1].keys[:, :, :2])
    assert torch.equal(found.values, kvmap.sinks[1].values[:, :, :2])
    assert kvmap.sink_for([1, 5, 7, 2]).token_ids == (1, 5, 7)
    assert kvmap.sink_for([2, 5, 7]) is None
    assert kvmap.sink_for([]) is None
