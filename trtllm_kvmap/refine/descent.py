"""Adam with a falling learning rate, the same for every term."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.errors import NumericsError
from trtllm_kvmap.refine.config import RefineConfig
from trtllm_kvmap.refine.terms import parameters


class Descent:
    """One optimiser over all ``terms`` (Kingma and Ba, arXiv 1412.6980; cosine decay to 0)."""

    def __init__(self, terms: Sequence[SecondTerm], config: RefineConfig) -> None:
        self._optimiser = torch.optim.Adam(parameters(terms), lr=config.learning_rate)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimiser, config.steps)

    def step(self, loss: torch.Tensor) -> None:
        """Raises NumericsError when the loss is no number: nothing is changed by it."""
        if not bool(torch.isfinite(loss)):
            raise NumericsError(
                "The loss is NaN or infinite; lower the learning rate, or check both models."
            )
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        self._schedule.step()
