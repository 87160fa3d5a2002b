"""`mlp`: a wide network beside each matrix, trained on the target's own keys and values.

For pairs whose keys and values are no linear function of each other; the plain ridge's failure on
some pairs, and what an MLP of 1,024 channels recovers of it, are reported in arXiv 2608.03893.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.calibrate.capture import capture_kv
from trtllm_kvmap.models import LoadedModel
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.descent import Descent
from trtllm_kvmap.refine.terms import begin, columns, refined, trainable

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0)
Rows = tuple[list[torch.Tensor], list[torch.Tensor]]


def train_mlp(
    kvmap: KvMap,
    source: LoadedModel,
    target: LoadedModel,
    training: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    config: RefineConfig,
    on_step: Callable[[int, int], None] | None = None,
) -> KvMap:
    """In memory are the activations of all documents."""
    numbers = trainable(kvmap)
    xs, ys = _rows(kvmap, numbers, source, target, training, config.skip_first)
    # Every head counts alike, however large its numbers are.
    weigh = [1 / y.square().mean().clamp_min(1e-12) for y in ys]
    terms = begin(xs, [y.shape[1] for y in ys], config.width, config.seed)
    order = torch.Generator().manual_seed(config.seed)
    descent = Descent(terms, config)
    for step in range(config.steps):
        batch = torch.randint(len(xs[0]), (config.batch_tokens,), generator=order)
        losses = [
            w * (term.run(x[batch]) - y[batch]).square().mean()
            for term, x, y, w in zip(terms, xs, ys, weigh, strict=True)
        ]
        descent.step(torch.stack(losses).sum())
        if on_step is not None:
            on_step(step + 1, config.steps)
    errors = _errors(terms, *_rows(kvmap, numbers, source, target, held_out, config.skip_first))
    scale = min(errors, key=lambda each: errors[each])
    record = {"held_out_error": {str(each): error for each, error in errors.items()}}
    return refined(kvmap, dict(zip(numbers, terms, strict=True)), scale, record | {"scale": scale})


def _rows(
    kvmap: KvMap,
    numbers: Sequence[int],
    source: LoadedModel,
    target: LoadedModel,
    documents: Sequence[Sequence[int]],
    skip_first: int,
) -> Rows:
    """For each group what it reads, and what its matrix leaves of what it should give."""
    xs: list[list[torch.Tensor]] = [[] for _ in numbers]
    ys: list[list[torch.Tensor]] = [[] for _ in numbers]
    for document in documents:
        ids = torch.tensor(document)
        read, wanted = capture_kv(source, ids), capture_kv(target, ids)
        for place, number in enumerate(numbers):
            group = kvmap.groups[number]
            linear = group.linear()
            assert linear is not None  # trainable: it is no copy
            x = columns(kvmap, group, read, ids)[skip_first:]
            native = (wanted.keys if group.field == "key" else wanted.values)[group.layer]
            y = native[list(group.heads)].transpose(0, 1).flatten(1).cpu().float()[skip_first:]
            xs[place].append(x)
            ys[place].append(y - (x @ linear[0] + linear[1]))
    return [torch.cat(x) for x in xs], [torch.cat(y) for y in ys]


@torch.no_grad()
def _errors(
    terms: Sequence[SecondTerm], xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]
) -> dict[float, float]:
    """The error by scale, as a share of what the matrices leave, mean over groups."""
    errors = {}
    for scale in SCALES:
        shares = [
            float((scale * term.run(x) - y).square().sum() / y.square().sum().clamp_min(1e-12))
            for term, x, y in zip(terms, xs, ys, strict=True)
        ]
        errors[scale] = sum(shares) / len(shares)
    return errors
