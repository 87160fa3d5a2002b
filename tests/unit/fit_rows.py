"""Rows of activations drawn for the fit tests, their moments, and plain least squares on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.group import HeadGroup
from trtllm_kvmap.artifact.moments import MomentPart, Moments, MomentSet
from trtllm_kvmap.artifact.native import SinkEntry, TokenTable
from trtllm_kvmap.spec.model import ModelSpec
from trtllm_kvmap.spec.rope import RopeParams
from trtllm_kvmap.spec.slices import FIELDS, Slice

# (layers, heads, head_dim) of a source and a target: equal, other width, other heads.
EQUAL = ((3, 2, 4), (4, 2, 4))
OTHER_WIDTH = ((3, 2, 4), (4, 2, 6))
OTHER_HEADS = ((3, 2, 4), (2, 3, 6))


def make_spec(name: str, layers: int, heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec(
        name, "qwen3", layers, 2 * heads, heads, head_dim, 16, 512, RopeParams(rotary_dim=head_dim)
    )


@dataclass
class Rows:
    """``values[slice]`` is float64 [tokens, head_dim]; the target's slices are both predicted and,
    in layer 0, readable.
    """

    source: ModelSpec
    target: ModelSpec
    values: dict[Slice, np.ndarray]

    def stack(self, slices: tuple[Slice, ...]) -> np.ndarray:
        return np.concatenate([self.values[s] for s in slices], axis=1)

    def slices(self, origin: str, field: str) -> tuple[Slice, ...]:
        return tuple(s for s in self.values if s.origin == origin and s.field == field)

    def moment_set(self, *, joint: bool = False, layers: range | None = None) -> MomentSet:
        """One part per field, or one of both; ``layers`` keeps a band of target layers."""
        fields = [FIELDS] if joint else [(field,) for field in FIELDS]
        parts = []
        for group in fields:
            targets = tuple(s for f in group for s in self.slices("target", f))
            slices = tuple(s for f in group for s in self.slices("source", f))
            slices += tuple(t for t in targets if t.layer == 0)
            kept = tuple(t for t in targets if layers is None or t.layer in layers)
            parts.append(self.part(slices, kept))
        vocab, heads, width = self.target.vocab_size, *self.target.kv_shape[1:]
        table = torch.zeros(vocab, heads, width)
        sink = torch.zeros(self.target.num_layers, heads, 1, width)
        return MomentSet(
            source=self.source,
            target=self.target,
            source_fingerprint=Fingerprint("a", "b", "c"),
            target_fingerprint=Fingerprint("d", "e", "c"),
            parts=tuple(parts),
            record={"documents": 1, "tokens": len(next(iter(self.values.values())))},
            token_table=TokenTable(table, table.clone()),
            sinks=(SinkEntry((1,), sink, sink.clone()),),
        )

    def part(self, slices: tuple[Slice, ...], targets: tuple[Slice, ...]) -> MomentPart:
        x, y = self.stack(slices), self.stack(targets)
        tensors = (x.T @ x, x.T @ y, x.sum(0), y.sum(0), (y * y).sum(0))
        return MomentPart(slices, targets, Moments(*map(torch.from_numpy, tensors), len(x)))


def draw_rows(
    source: tuple[int, int, int],
    target: tuple[int, int, int],
    *,
    tokens: int = 400,
    noise: float = 0.5,
    seed: int = 0,
) -> Rows:
    """(layers, heads, head_dim) of both models. Every slice is a noisy view of six hidden numbers,
    with a mean and a scale of its own, so that a fit without bias or with one ridge for all slices
    goes wrong.
    """
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(tokens, 6))
    values = {}
    for origin, (layers, heads, width) in (("source", source), ("target", target)):
        for field in FIELDS:
            for layer in range(layers):
                for head in range(heads):
                    mix = rng.normal(size=(6, width)) * (rng.random(6) < 0.6)[:, None]
                    view = hidden @ mix + noise * rng.normal(size=(tokens, width))
                    scale, mean = 10.0 ** rng.uniform(-2, 1), rng.normal(size=width)
                    values[Slice(origin, field, layer, head)] = scale * (view + 3 * mean)
    return Rows(make_spec("source", *source), make_spec("target", *target), values)


def targets_of(group: HeadGroup) -> tuple[Slice, ...]:
    return tuple(Slice("target", group.field, group.layer, head) for head in group.heads)


def least_squares(
    rows: Rows, slices: tuple[Slice, ...], targets: tuple[Slice, ...], ridge: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """weight, bias and the penalised objective of ridge regression, by QR on the rows themselves
    with the penalty's rows appended: no moments, no normal equations.
    """
    x, y = rows.stack(slices), rows.stack(targets)
    xc, yc = x - x.mean(0), y - y.mean(0)
    penalty = np.concatenate(
        [
            np.full(v.shape[1], ridge * np.mean(((v - v.mean(0)) ** 2).sum(0)))
            for v in (rows.values[s] for s in slices)
        ]
    )
    a = np.concatenate([xc, np.diag(np.sqrt(penalty))])
    b = np.concatenate([yc, np.zeros((x.shape[1], y.shape[1]))])
    weight = np.linalg.lstsq(a, b, rcond=None)[0]
    objective = float(((b - a @ weight) ** 2).sum())
    return weight, y.mean(0) - x.mean(0) @ weight, objective
