"""`residual`: a narrow network beside each matrix, trained on what the target says with it.

The map's matrices are frozen. A document's beginning is mapped, the target reads the rest on top of
it, and the KL divergence from the teacher's next-token distributions is followed back through the
target, its cache and RoPE into the networks. The scale they are added with is chosen on documents
that trained nothing, and may be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.calibrate.capture import HeldCache, captured, read
from trtllm_kvmap.calibrate.continuation import Asked, log_p_after
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.descent import Descent
from trtllm_kvmap.refine.terms import begin, columns, refined, trainable
from trtllm_kvmap.rotary import apply_rope

SCALES = (0.0, 0.5, 1.0, 1.5)


def train_residual(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    training: Sequence[Asked],
    held_out: Sequence[Asked],
    config: RefineConfig,
    on_step: Callable[[int, int], None] | None = None,
) -> KvMap:
    """Documents are (what is mapped, what is read after it: any number of continuations)."""
    numbers = trainable(kvmap)
    lesson = _Lesson(kvmap, numbers, source, target, config)
    first = [
        torch.cat(each) for each in zip(*(lesson.inputs(d[0]) for d in training[:8]), strict=True)
    ]
    outs = [kvmap.groups[i].bias.numel() for i in numbers]  # type: ignore[union-attr]
    terms = begin(first, outs, config.width, config.seed)
    order = torch.Generator().manual_seed(config.seed)
    descent = Descent(terms, config)
    for step in range(config.steps):
        document = training[int(torch.randint(len(training), (1,), generator=order))]
        descent.step(lesson.divergence(document, terms, 1.0))
        if on_step is not None:
            on_step(step + 1, config.steps)
    with torch.no_grad():
        found = {
            scale: float(
                sum(lesson.divergence(document, terms, scale) for document in held_out)
                / len(held_out)
            )
            for scale in SCALES
        }
    scale = min(found, key=lambda each: found[each])
    record = {"held_out_kl": {str(each): kl for each, kl in found.items()}, "scale": scale}
    return refined(kvmap, dict(zip(numbers, terms, strict=True)), scale, record)


@dataclass(frozen=True)
class _Lesson:
    """The teacher's words against the target's on a mapped cache."""

    kvmap: KvMap
    numbers: Sequence[int]
    source: LoadedModel
    target: LoadedModel
    config: RefineConfig

    def inputs(self, document: Sequence[int]) -> list[torch.Tensor]:
        ids = torch.tensor(document)
        return self._inputs(ids, read(self.source, ids))

    def _inputs(self, ids: torch.Tensor, cache: HeldCache) -> list[torch.Tensor]:
        kv = captured(self.source, cache)
        return [columns(self.kvmap, self.kvmap.groups[i], kv, ids) for i in self.numbers]

    def divergence(self, asked: Asked, terms: Sequence[SecondTerm], scale: float) -> torch.Tensor:
        """KL(teacher || mapped target), nats a token, mean over all tokens of the continuations."""
        document, continuations = asked
        ids = torch.tensor(document)
        caches = {"source": read(self.source, ids), "target": read(self.target, ids)}
        native = captured(self.target, caches["target"])
        # What no group's term touches (copies of the target's own layer 0) is native already.
        keys, values = list(native.keys.unbind(0)), list(native.values.unbind(0))
        skip, inputs = self.config.skip_first, self._inputs(ids, caches["source"])
        for number, x, term in zip(self.numbers, inputs, terms, strict=True):
            group = self.kvmap.groups[number]
            linear = group.linear()
            assert linear is not None  # trainable: it is no copy
            y = x @ linear[0] + linear[1] + scale * term.run(x)
            heads = y.view(len(ids), len(group.heads), -1).transpose(0, 1).to(self.target.device)
            field = keys if group.field == "key" else values
            mapped = field[group.layer].clone()
            mapped[list(group.heads), skip:] = heads[:, skip:]
            field[group.layer] = mapped
        rope, length = self.target.spec.rope, self.target.rope_length(len(ids))
        positions = torch.arange(len(ids), device=self.target.device)
        turned = [apply_rope(k, positions, rope, length)[None] for k in keys]
        teacher = self.target if self.config.teacher == "target" else self.source
        taught: Any = caches[self.config.teacher].layers
        held = [layer.keys for layer in taught], [layer.values for layer in taught]
        total, tokens = torch.zeros(()), 0
        for continuation in continuations:
            with torch.no_grad():
                wanted = log_p_after(teacher, *held, continuation)
            said = log_p_after(self.target, turned, [v[None] for v in values], continuation)
            total = total + (wanted.exp() * (wanted - said)).sum().cpu()
            tokens += len(continuation)
        return total / tokens
