"""The real lm-evaluation-harness of the lane `lmeval`, and a map between two of the tiny family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_kvmap.calibrate.config import CalibrationConfig
from trtllm_kvmap.calibrate.run import calibrate
from trtllm_kvmap.fit import fit
from trtllm_kvmap.fit.config import FitConfig
from trtllm_kvmap.models import load_model
from trtllm_kvmap.tiny import model_folder as tiny_folder
from trtllm_kvmap.tiny.documents import make_document

VERSION = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def harness(pytestconfig: pytest.Config) -> Any:
    """The module `lm_eval`; the fake that another test may have put in its place is no file."""
    absent = "no lm_eval here; build_scripts/run_tests.py -k lmeval installs it"
    lm_eval = pytest.importorskip("lm_eval", reason=absent)
    if getattr(lm_eval, "__file__", None) is None:
        pytest.skip(absent)
    pytestconfig.stash[VERSION] = f"lm_eval {lm_eval.__version__}: {lm_eval.__file__}"
    return lm_eval


@pytest.fixture(scope="session")
def tiny_map(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-s to tiny-m, fitted on so few documents that it errs."""
    folder = tmp_path_factory.mktemp("map")
    models = [load_model(tiny_folder(name)) for name in ("tiny-s", "tiny-m")]
    rng = np.random.default_rng(0)
    documents = [models[0].tokenise(make_document(rng, 256, 8, 0).text) for _ in range(12)]
    moments = calibrate(
        *models, documents, CalibrationConfig(), folder / "pair.moments.safetensors"
    )
    fit(moments, FitConfig(n=1, ridge=0.3)).save(folder / "pair.kvmap.safetensors")
    return folder / "pair.kvmap.safetensors"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if VERSION in config.stash:
        terminalreporter.write_line(config.stash[VERSION])
