"""Fixtures every test may use: tiny random models, made once per run and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from native_operators import load_operators
from random_models import write_model

from trtllm_kvmap.models import LoadedModel, load_model

torch.set_num_threads(1)
# Examples have no time limit: a busy machine is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Needs a model from a package registry: collected only when it is named, as its own lane does.
collect_ignore = ["real"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``model_folder("llama", layers=3, seed=1, ...)``: the folder of such a model, see
    random_models.write_model. Equal arguments give the same folder: do not write into it.
    """
    made: dict[str, Path] = {}

    def folder(architecture: str = "qwen3", **options: Any) -> Path:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            path = tmp_path_factory.mktemp("models") / f"{architecture}-{len(made)}"
            write_model(path, architecture, **options)
            made[key] = path
        return made[key]

    return folder


@pytest.fixture(scope="session")
def native_operators() -> Path:
    """The library of torch operators, built for the CPU and loaded: backend ``cuda``."""
    return load_operators()


@pytest.fixture(scope="session")
def random_model(model_folder: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """``random_model("qwen3", seed=1, ...)``: the loaded model of model_folder, shared between
    tests: do not change its weights.
    """
    loaded: dict[Path, LoadedModel] = {}

    def model(architecture: str = "qwen3", **options: Any) -> LoadedModel:
        path = model_folder(architecture, **options)
        if path not in loaded:
            loaded[path] = load_model(path)
        return loaded[path]

    return model
