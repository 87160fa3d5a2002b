"""What is read after a document: which tokens, and what a model then says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trtllm_kvmap.calibrate.capture import cache_of
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.models import LoadedModel

Asked = tuple[Sequence[int], Sequence[Sequence[int]]]  # a document, the continuations after it


def asked_after(
    documents: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]] | None,
    least: int = 1,
) -> list[Asked]:
    """Each document with its continuations (token ids); None cuts off the last quarter of every
    document as its only one, and leaves at least ``least`` tokens before it.

    Raises InputError unless every document has a continuation and every continuation a token.
    """
    if continuations is None:
        cuts = [max(least, 3 * len(ids) // 4) for ids in documents]
        return [(ids[:cut], [ids[cut:]]) for ids, cut in zip(documents, cuts, strict=True)]
    if len(continuations) != len(documents) or not all(e and all(e) for e in continuations):
        raise InputError(
            f"Every document needs at least one continuation of at least one token; "
            f"{len(documents)} documents were given, and continuations for {len(continuations)}."
        )
    return list(zip(documents, continuations, strict=True))


def log_p_after(
    loaded: LoadedModel,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    continuation: Sequence[int],
) -> torch.Tensor:
    """The log-probabilities of the next token after each of ``continuation``, float32 [tokens,
    vocab_size], read on top of rotated keys and values (see cache_of), through which gradients
    flow.
    """
    logits = _run_after(loaded.model, loaded, keys, values, continuation).logits[0]
    log_p: torch.Tensor = logits.float().log_softmax(-1)
    return log_p


@torch.no_grad()
def read_after(
    loaded: LoadedModel,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    continuation: Sequence[int],
) -> None:
    """Read as log_p_after does, for what attention is given on the way: no logits are computed."""
    _run_after(loaded.model.base_model, loaded, keys, values, continuation)


def _run_after(
    run: Callable[..., Any],
    loaded: LoadedModel,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    continuation: Sequence[int],
) -> Any:
    held, device = keys[0].shape[2], loaded.device
    return run(
        input_ids=torch.tensor([list(continuation)], device=device),
        position_ids=torch.arange(held, held + len(continuation), device=device)[None],
        use_cache=True,
        **{loaded.cache_argument: cache_of(keys, values)},
    )
