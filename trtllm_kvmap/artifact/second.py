"""The optional second term of a head group: a narrow network beside the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from trtllm_kvmap.errors import FormatError

Activation = Literal["identity", "silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
SECOND_TENSORS = ("down", "offset", "up")


@dataclass(frozen=True, slots=True)
class SecondTerm:
    """``activation(x @ down + offset) @ up``, added to a group's ``x @ weight + bias``.

    down [sum of slice widths, hidden]; offset [hidden]; up [hidden, len(heads) * head_dim]; all
    float32. With the identity it is a matrix of rank ``hidden`` (a low-rank map, when the group has
    no weight); with silu, x * sigmoid(x), it is a residual network (hidden 16, say) or an MLP
    (hidden 1,024).
    """

    down: torch.Tensor
    offset: torch.Tensor
    up: torch.Tensor
    activation: Activation

    @property
    def num_parameters(self) -> int:
        return self.down.numel() + self.offset.numel() + self.up.numel()

    def check(self, where: str, width: int, out: int) -> None:
        """Raise FormatError unless the term reads ``width`` columns and writes ``out``."""
        if self.activation not in ACTIVATIONS:
            raise FormatError(
                f"The second term of the {where} has the activation {self.activation!r}; use one "
                f"of {', '.join(ACTIVATIONS)}."
            )
        hidden = self.offset.numel()
        wanted = {"down": (width, hidden), "offset": (hidden,), "up": (hidden, out)}
        for name, shape in wanted.items():
            tensor: torch.Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                raise FormatError(
                    f"The second term of the {where} needs {name} float32 {shape}, got "
                    f"{tensor.dtype} {tuple(tensor.shape)}."
                )

    def to(self, device: torch.device) -> SecondTerm:
        down, offset, up = (t.to(device) for t in (self.down, self.offset, self.up))
        return SecondTerm(down, offset, up, self.activation)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [num_tokens, out] of ``x`` float32 [num_tokens, width]. Differentiable."""
        hidden = torch.addmm(self.offset, x, self.down)
        if self.activation == "silu":
            hidden = torch.nn.functional.silu(hidden)
        return hidden @ self.up
