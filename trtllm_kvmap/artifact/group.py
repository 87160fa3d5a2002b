"""Target heads of one layer and field that read the same slices: a matrix, and what may stand
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_kvmap.artifact.second import SecondTerm
from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.spec.slices import Field, Slice


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Target heads of one layer and field that read the same slices with one matrix.

    weight [sum of slice widths, len(heads) * target head_dim], columns head-major; bias [len(heads)
    * head_dim]. A weight of float8_e4m3fn has ``weight_scale`` float32 [columns], one factor for
    each. ``second`` is added to the result. A group without a bias is the identity (copy): one
    slice per head, in head order, of the target's head_dim, and nothing else.
    """

    field: Field
    layer: int
    heads: tuple[int, ...]
    slices: tuple[Slice, ...]
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None = None
    second: SecondTerm | None = None

    @property
    def copies(self) -> bool:
        return self.bias is None

    @property
    def num_parameters(self) -> int:
        tensors = self.weight, self.bias, self.weight_scale
        held = sum(t.numel() for t in tensors if t is not None)
        return held + (self.second.num_parameters if self.second else 0)

    def matrix(self) -> torch.Tensor | None:
        """The weight in float32, scales multiplied in; None for a copy and for a group that is its
        second term alone.
        """
        if self.weight is None or self.weight_scale is None:
            return None if self.weight is None else self.weight.float()
        return self.weight.float() * self.weight_scale

    def linear(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(weight, bias) in float32 of a group that is one matrix, a linear second term multiplied
        out; None for a copy.

        Raises UnavailableError for a second term that is no matrix.
        """
        if self.bias is None:
            return None
        weight, bias, second = self.matrix(), self.bias.float(), self.second
        if second is not None:
            if second.activation != "identity":
                raise UnavailableError(
                    f"The map's {self.field} of layer {self.layer} has a second term with the "
                    f"activation {second.activation}, which only the backends reference and cpu "
                    f"compute; use one of these, or a map without it."
                )
            product = second.down @ second.up
            weight = product if weight is None else weight + product
            bias = bias + second.offset @ second.up
        assert weight is not None  # KvMap: a bias stands beside a weight or a second term
        return weight, bias
