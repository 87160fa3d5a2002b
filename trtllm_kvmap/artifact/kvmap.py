"""A KvMap: for every target head, an ordered list of source slices and one matrix. The fitted
thing, as a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trtllm_kvmap.artifact.container import container_digest, read_container, write_container
from trtllm_kvmap.artifact.evidence import require_proven
from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.native import (
    SinkEntry,
    TokenTable,
    native_from_tensors,
    native_to_tensors,
)
from trtllm_kvmap.artifact.pair import pair_from_json, pair_to_json, require_pair
from trtllm_kvmap.artifact.record import (
    slices_from_json,
    slices_to_json,
)
from trtllm_kvmap.artifact.second import SECOND_TENSORS, SecondTerm
from trtllm_kvmap.errors import (
    FormatError,
    MismatchError,
    NumericsError,
)
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.slices import FIELDS, Slice

# Maps without second terms and scaled weights are written as version 1, which every reader knows.
FORMAT_VERSION = 2
KIND = "kvmap"
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class KvMap:
    """Everything needed to turn the source's cache into the target's, with its provenance.

    ``groups`` cover every (layer, field, head) of the target exactly once. ``fitted`` says how it
    was fitted and keeps the candidate table; ``evidence`` is the held-out report it earned (None:
    none yet); ``guard`` is what decides whether a hand-over may stand (decode.guard.guard; None: no
    guard was set). All three are JSON.
    """

    source: ModelSpec
    target: ModelSpec
    source_fingerprint: Fingerprint
    target_fingerprint: Fingerprint
    scope: str
    groups: tuple[HeadGroup, ...]
    fitted: dict[str, Any]
    token_table: TokenTable | None = None
    sinks: tuple[SinkEntry, ...] = ()
    evidence: dict[str, Any] | None = None
    guard: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_coverage()
        self._check_native()
        for group in self.groups:
            self._check_group(group)

    @property
    def num_parameters(self) -> int:
        return sum(group.num_parameters for group in self.groups)

    @property
    def reads_token_ids(self) -> bool:
        return any(s.origin == "target" for g in self.groups for s in g.slices)

    def slice_width(self, s: Slice) -> int:
        return self.source.head_dim if s.origin == "source" else self.target.head_dim

    def sink_for(self, token_ids: Sequence[int]) -> SinkEntry | None:
        """The target's exact KV of as many first tokens of ``token_ids`` as a stored prefix shares
        with them; None when not even the first token is known.
        """
        shared = [(entry, entry.shared_length(token_ids)) for entry in self.sinks]
        entry, length = max(shared, key=lambda pair: pair[1], default=(None, 0))
        return entry.first(length) if entry is not None and length else None

    def with_evidence(self, evidence: dict[str, Any]) -> KvMap:
        return replace(self, evidence=evidence)

    def with_guard(self, guard: dict[str, Any]) -> KvMap:
        return replace(self, guard=guard)

    def require_models(self, source: Fingerprint, target: Fingerprint) -> None:
        """Raise MismatchError unless these are the two models the map was fitted for."""
        require_pair(self, source, target)

    def save(self, path: str | Path) -> str:
        """Write the file (whole or absent); returns its digest, which names the map in salts. With
        evidence its header says the map_digest too, which reads every tensor once more.
        """
        version, content, tensors = self._described()
        if self.evidence is not None:
            content["map_digest"] = self.map_digest()
        return write_container(path, KIND, version, content, tensors)

    def map_digest(self) -> str:
        """What save returns, or would, of this map without evidence and guard, which are added to
        it later: the digest of the file that fit wrote. Evidence names its map by it. Reads every
        tensor and writes nothing.
        """
        version, content, tensors = replace(self, evidence=None, guard=None)._described()
        return container_digest(KIND, version, content, tensors)

    def _described(self) -> tuple[int, dict[str, Any], dict[str, torch.Tensor]]:
        """The version, content and tensors of the map's file."""
        tensors: dict[str, torch.Tensor] = {}
        index = []
        for number, group in enumerate(self.groups):
            for name in ("weight", "bias", "weight_scale"):
                if (tensor := getattr(group, name)) is not None:
                    tensors[f"group.{number}.{name}"] = tensor
            entry: dict[str, Any] = {
                "field": group.field,
                "layer": group.layer,
                "heads": list(group.heads),
                "slices": slices_to_json(group.slices),
            }
            if group.second is not None:
                entry["second"] = group.second.activation
                for name in SECOND_TENSORS:
                    tensors[f"group.{number}.second.{name}"] = getattr(group.second, name)
            index.append(entry)
        tensors |= native_to_tensors(self.token_table, self.sinks)
        content = {
            **pair_to_json(self),
            "scope": self.scope,
            "groups": index,
            "sinks": [list(entry.token_ids) for entry in self.sinks],
            "fitted": self.fitted,
            "evidence": self.evidence,
            **({} if self.guard is None else {"guard": self.guard}),
        }
        newer = any(g.second is not None or g.weight_scale is not None for g in self.groups)
        return 2 if newer else 1, content, tensors

    @staticmethod
    def load(path: str | Path, *, allow_unproven: bool = False) -> KvMap:
        """Read a map. Raises FormatError for a file that is not whole, MismatchError for a map
        between different tokenizers, UnprovenError for one whose evidence does not prove it (see
        evidence.unproven).

        ``allow_unproven`` loads a map that no held-out report vouches for (to evaluate it, for
        instance).
        """
        kvmap, map_digest = read_map(path)
        if not allow_unproven:
            require_proven(path, kvmap.evidence, map_digest)
        return kvmap

    def _check_coverage(self) -> None:
        layers, heads = self.target.num_layers, self.target.num_kv_heads
        wanted = [
            (f, layer, head) for f in FIELDS for layer in range(layers) for head in range(heads)
        ]
        given = sorted((g.field, g.layer, head) for g in self.groups for head in g.heads)
        if given != sorted(wanted):
            raise FormatError(
                f"A map must cover each of the target's {layers} layers x {heads} heads once for "
                f"keys and once for "
                f"values; this one covers {len(set(given))} of {len(wanted)}, with "
                f"{len(given) - len(set(given))} twice."
            )
        if self.reads_token_ids and self.token_table is None:
            raise FormatError(
                "The map reads the target's own layer 0 but carries no token table; fit it again."
            )

    def _check_native(self) -> None:
        layers, heads, dim = self.target.kv_shape
        wanted: tuple[int, ...]
        if self.token_table is not None:
            wanted = (self.target.vocab_size, heads, dim)
            found = {tuple(t.shape) for t in (self.token_table.keys, self.token_table.values)}
            if found != {wanted}:
                raise FormatError(
                    f"The map's token table must be {wanted}, got {sorted(found)}; fit it again."
                )
        for entry in self.sinks:
            wanted = (layers, heads, len(entry.token_ids), dim)
            found = {tuple(t.shape) for t in (entry.keys, entry.values)}
            if found != {wanted}:
                raise FormatError(
                    f"The map's sink of tokens {entry.token_ids} must be {wanted}, got "
                    f"{sorted(found)}; fit it again."
                )

    def _check_group(self, group: HeadGroup) -> None:
        where = f"{group.field} of layer {group.layer}, heads {group.heads}"
        # Of the target only layer 0 is a function of the token alone.
        limits = {
            "source": (self.source.num_layers, self.source.num_kv_heads),
            "target": (1, self.target.num_kv_heads),
        }
        for s in group.slices:
            layers, heads = limits.get(s.origin, (0, 0))
            if not (0 <= s.layer < layers and 0 <= s.head < heads and s.field in FIELDS):
                raise FormatError(
                    f"The map's {where} reads {s}; it may read {layers} layers x {heads} heads of "
                    f"the {s.origin}."
                )
        width = sum(self.slice_width(s) for s in group.slices)
        out = len(group.heads) * self.target.head_dim
        if group.copies:
            beside = group.weight, group.weight_scale, group.second
            if any(part is not None for part in beside):
                raise FormatError(f"The map's {where} lacks its bias of {(out,)}; fit it again.")
            if width != out or len(group.slices) != len(group.heads):
                raise MismatchError(
                    f"A copy needs one slice of head_dim {self.target.head_dim} for each head; "
                    f"the {where} has "
                    f"{len(group.slices)} slices of {width} channels in all. Use the scope "
                    f"`slice` for unequal shapes."
                )
            return
        wanted = {"weight": (width, out), "bias": (out,), "weight_scale": (out,)}
        for name, shape in wanted.items():
            tensor: torch.Tensor | None = getattr(group, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise FormatError(
                    f"The map's {where} needs a {name} of {shape}, got {tuple(tensor.shape)}."
                )
        if group.weight is None and group.second is None:
            raise FormatError(
                f"The map's {where} has a bias but neither a weight of {(width, out)} nor a second "
                f"term; fit it again."
            )
        if (group.weight_scale is not None) != (
            group.weight is not None and group.weight.dtype == FLOAT8
        ):
            raise FormatError(
                f"The map's {where} needs weight_scale beside a float8_e4m3fn weight, and only "
                f"there."
            )
        if group.second is not None:
            group.second.check(where, width, out)


def read_map(path: str | Path) -> tuple[KvMap, str | None]:
    """The map, proven or not, and the map_digest in its header, which its evidence must name (None:
    the header says none). Raises as KvMap.load does.
    """
    content, tensors = read_container(path, KIND, FORMAT_VERSION)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.float()).all()):
            raise NumericsError(f"{path}: tensor {name} holds NaN or infinity; fit the map again.")
    try:
        kvmap = _from_content(content, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: the map is incomplete ({error}); fit it again.") from error
    if kvmap.source_fingerprint.tokenizer != kvmap.target_fingerprint.tokenizer:
        raise MismatchError(
            f"{path} leads between models with different tokenizers, whose caches do not stand "
            f"for the same tokens, so it can serve no pair. Fit a map for two models of one "
            f"tokenizer."
        )
    return kvmap, content.get("map_digest")


def _from_content(content: dict[str, Any], tensors: dict[str, torch.Tensor]) -> KvMap:
    groups = tuple(
        HeadGroup(
            field=entry["field"],
            layer=entry["layer"],
            heads=tuple(entry["heads"]),
            slices=slices_from_json(entry["slices"]),
            weight=tensors.get(f"group.{number}.weight"),
            bias=tensors.get(f"group.{number}.bias"),
            weight_scale=tensors.get(f"group.{number}.weight_scale"),
            second=_second(number, entry, tensors),
        )
        for number, entry in enumerate(content["groups"])
    )
    table, sinks = native_from_tensors(tensors, content["sinks"])
    for name in ("evidence", "guard"):
        if not isinstance(content.get(name), dict | None):
            raise TypeError(f"its {name} is no object")
    return KvMap(
        **pair_from_json(content),
        scope=content["scope"],
        groups=groups,
        fitted=content["fitted"],
        token_table=table,
        sinks=sinks,
        evidence=content["evidence"],
        guard=content.get("guard"),
    )


def _second(
    number: int, entry: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> SecondTerm | None:
    if "second" not in entry:
        return None
    down, offset, up = (tensors[f"group.{number}.second.{name}"] for name in SECOND_TENSORS)
    return SecondTerm(down, offset, up, entry["second"])
