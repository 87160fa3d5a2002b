"""The backends that every test of the contract runs on."""

from __future__ import annotations

import pytest

from trtllm_kvmap.mapper.backends import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend's name. ``cuda`` runs here on CPU pools, where its operator is the plain formula
    in C++; the same cases on a GPU are build_scripts/gpu/conformance.py.
    """
    if request.param == "cuda":
        request.getfixturevalue("native_operators")
    return str(request.param)
