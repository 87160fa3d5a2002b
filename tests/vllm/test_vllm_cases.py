"""Every host-neutral case in vLLM's own engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from connector_cases import CASES, Case, title
from connector_world import World

KINDS = [(kind, case) for kind, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(
    ("kind", "case"), KINDS, ids=[f"{kind}-{title(case)}" for kind, case in KINDS]
)
def test_vllm(kind: str, case: Case, engines: Callable, world: World) -> None:
    case(engines(kind), world)
    leftover = [salt for salt in world.blocks.salts() if salt not in world.blocks.broken]
    for salt in leftover:  # what a case offered and no request took
        world.blocks.done(salt)
