"""The real NIXL of the lane `nixl`, and a map between two of the tiny family."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.errors import UnavailableError
from trtllm_kvmap.exchange.nixl import load_api
from trtllm_kvmap.fit import fit
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.tiny import model_folder as tiny_folder
from trtllm_kvmap.tiny.documents import make_document


@pytest.fixture(scope="session")
def nixl_api() -> ModuleType:
    try:
        return load_api()
    except UnavailableError as error:
        pytest.skip(f"{error} The lane nixl has it.")


@pytest.fixture(autouse=True)
def say_which_nixl(nixl_api: ModuleType) -> None:
    """Every test's output names the library it ran on."""
    package = nixl_api.__name__.split(".")[0].replace("_", "-")
    print(f"{package} {importlib.metadata.version(package)}, {nixl_api.__file__}")


@pytest.fixture(scope="session")
def tiny_pair() -> tuple[LoadedModel, LoadedModel]:
    return load_model(tiny_folder("tiny-s")), load_model(tiny_folder("tiny-m"))


@pytest.fixture(scope="session")
def tiny_map(
    tiny_pair: tuple[LoadedModel, LoadedModel], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """tiny-s to tiny-m, fitted on 30 documents."""
    folder = tmp_path_factory.mktemp("map")
    rng = np.random.default_rng(0)
    documents = [tiny_pair[0].tokenise(make_document(rng, 512, 16, 0).text) for _ in range(30)]
    moments = calibrate(
        *tiny_pair, documents, CalibrationConfig(), folder / "pair.moments.safetensors"
    )
    fit(moments, FitConfig(n=6)).save(folder / "pair.kvmap.safetensors")
    return folder / "pair.kvmap.safetensors"


@pytest.fixture(scope="session")
def prompt(tiny_pair: tuple[LoadedModel, LoadedModel]) -> list[int]:
    """A document and a question about it, 507 tokens."""
    document = make_document(np.random.default_rng(1), 512, 16, 1)
    return tiny_pair[0].tokenise(f"{document.text} {document.questions[0].stem}")
