"""A Triton model configuration, as config.pbtxt holds it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorPort:
    """An input or output; -1 in ``dims`` is any size."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False

    def render(self) -> str:
        dims = ", ".join(str(size) for size in self.dims)
        optional = " optional: true" if self.optional else ""
        name = json.dumps(self.name)
        return f"  {{ name: {name} data_type: {self.data_type} dims: [{dims}]{optional} }}"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model of the python backend. ``decoupled``: a request may have any number of responses.
    ``instances`` processes run it. ``policies_elsewhere``: batching and decoupling are left to the
    model's own code, as TensorRT-LLM's does.
    """

    name: str
    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    parameters: dict[str, str] = field(default_factory=dict)
    decoupled: bool = False
    instances: int = 1
    policies_elsewhere: bool = False

    def render(self) -> str:
        lines = [f"name: {json.dumps(self.name)}", 'backend: "python"']
        if not self.policies_elsewhere:
            lines.append("max_batch_size: 0")
            lines += ["model_transaction_policy { decoupled: true }"] * self.decoupled
        for direction, ports in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"{direction} [", ",\n".join(port.render() for port in ports), "]"]
        lines.append(f"instance_group [ {{ kind: KIND_CPU count: {self.instances} }} ]")
        for key, value in sorted(self.parameters.items()):
            # A JSON string is a protobuf text string as long as it is ASCII.
            lines.append(
                f"parameters {{ key: {json.dumps(key)} "
                f"value {{ string_value: {json.dumps(value)} }} }}"
            )
        return "\n".join(lines) + "\n"
