"""Asks everything an item asks of one ready model, in one pass, and leaves its cache as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trtllm_kvmap.evaluate.tasks.items import Item
from trtllm_kvmap.evaluate.tree import TokenTree
from trtllm_kvmap.inject.hf_cache import HfCache, fork, num_entries
from trtllm_kvmap.models import LoadedModel


@dataclass(frozen=True, slots=True)
class Ready:
    """A model about to go on: its cache (batch 1), the logits [vocab] of the last token in it, the
    position of the next token, and which tokens of the context are mapped in the cache.
    """

    model: LoadedModel
    cache: HfCache
    logits: torch.Tensor
    position: int
    mapped: range = range(0)


class Script:
    """What is asked after the context of ``item``: its questions, its continuation, and the
    target's own ``rollout`` (token ids), each as the nodes of a tree that predict its tokens.
    """

    def __init__(self, item: Item, rollout: Sequence[int]) -> None:
        self.item = item
        self.rollout = tuple(rollout)
        self.tree = TokenTree()
        self.choices = [
            [
                self.tree.add(question.stem + choice)[len(question.stem) + given :]
                for choice, given in zip(question.choices, question.skipped, strict=True)
            ]
            for question in item.questions
        ]
        self.continuation = self.tree.add(item.continuation)
        self.predicted_rollout = self.tree.add(rollout)


@dataclass(frozen=True, slots=True)
class Answers:
    """``log_probs`` float32 [1 + nodes, vocab] (row 0: after the context, row 1 + i: after node i)
    and the attention output of every layer at every node, [nodes, hidden] each.
    """

    log_probs: torch.Tensor
    attention: tuple[torch.Tensor, ...]

    def token_log_probs(self, predictors: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:
        """float64 [n]: the log-probability, in nats, of each token at the node that predicts it."""
        rows = torch.tensor(predictors, dtype=torch.int64) + 1
        columns = torch.tensor(token_ids, dtype=torch.int64)
        return self.log_probs[rows, columns].double().numpy()

    def top1(self, predictors: Sequence[int]) -> list[int]:
        """The likeliest token at each node."""
        rows = torch.tensor(predictors, dtype=torch.int64) + 1
        return self.log_probs[rows].argmax(-1).tolist()


@torch.no_grad()
def ask(ready: Ready, tree: TokenTree) -> Answers:
    """Read ``tree`` after the context, on a fork of the cache of ``ready``."""
    logits, attention = ready.logits[None], []
    if len(tree):
        with attention_outputs(ready.model) as attention:
            logits = torch.cat([logits, _read(ready, tree)])
    return Answers(
        torch.log_softmax(logits.float(), dim=-1).cpu(), tuple(output[0] for output in attention)
    )


@contextmanager
def attention_outputs(loaded: LoadedModel) -> Iterator[list[torch.Tensor]]:
    """Collects what every self-attention module returns, [batch, tokens, hidden], in order of
    layers, while the block runs.
    """
    caught: list[torch.Tensor] = []
    layers: Any = loaded.model.base_model.layers
    hooks = [
        layer.self_attn.register_forward_hook(lambda _m, _i, output: caught.append(output[0]))
        for layer in layers
    ]
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()


def _read(ready: Ready, tree: TokenTree) -> torch.Tensor:
    """Logits [nodes, vocab]. Every node sees the whole cache, itself and its ancestors."""
    loaded, entries = ready.model, num_entries(ready.cache)
    dtype, device = loaded.model.dtype, loaded.device
    # An additive mask suits every attention implementation; a boolean one does not.
    mask = torch.zeros(len(tree), entries + len(tree), dtype=dtype, device=device)
    hidden = torch.from_numpy(~tree.visible()).to(device)
    mask[:, entries:].masked_fill_(hidden, torch.finfo(dtype).min)
    logits: torch.Tensor = loaded.model(
        input_ids=torch.tensor([tree.token_ids], device=device),
        position_ids=ready.position + torch.tensor([tree.depths], device=device),
        attention_mask=mask[None, None],
        use_cache=True,
        **{loaded.cache_argument: fork(ready.cache)},
    ).logits
    return logits[0].float()
