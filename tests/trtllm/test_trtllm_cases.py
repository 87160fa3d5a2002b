"""The cases that every host with a connector must pass, on the FAKE TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import connector_cases as cases
import fake_blocks
import pytest
from connector_world import World
from fake_host import FakeTrtLlm, Shell, start_target
from fake_tensorrt_llm import VERSIONS

# What cannot be asked of this engine, and why.
LEFT_OUT = {
    cases.case_preemption_loses_nothing: (
        "the engine runs a connector under GUARANTEED_NO_EVICT alone, so nothing is preempted"
    ),
    cases.case_without_its_salt_a_request_is_offered_nothing: (
        "a request of this engine can name a hand-over by its salt alone; test_trtllm_shell.py has "
        "one without"
    ),
}
# On the older release every case; on the newer one those that its other way to tell a salt and its
# narrow batches could break.
OLD = VERSIONS[0]
AGAIN = (
    cases.case_a_mapped_request_goes_on_as_the_hf_lane_does,
    cases.case_a_plain_request_never_hits_mapped_blocks,
    cases.case_the_next_turn_hits_its_own_blocks_decoded_ones_too,
    cases.case_chunked_prefill_loses_nothing,
)
KINDS = {
    "roomy": {"num_blocks": 64, "max_num_tokens": 8192},
    "narrow": {"num_blocks": 24, "max_num_tokens": 48},
}


@pytest.fixture
def kind_of_host(
    request: pytest.FixtureRequest, imported: Shell, settings: Path, world: World
) -> Iterator[FakeTrtLlm]:
    yield start_target(
        imported,
        world.target,
        fake_blocks.BLOCKS.awaited,
        **KINDS[request.param],
    )
    fake_blocks.BLOCKS.awaited.clear()


@pytest.mark.parametrize(
    ("imported", "kind_of_host", "case"),
    [
        pytest.param(version, kind, case, id=f"{version}-{kind}-{cases.title(case)}")
        for version in VERSIONS
        for kind, group in cases.CASES.items()
        for case in group
        if version == OLD or case in AGAIN
    ],
    indirect=["imported", "kind_of_host"],
)
def test_case(kind_of_host: FakeTrtLlm, case: cases.Case, world: World) -> None:
    if case in LEFT_OUT:
        pytest.skip(LEFT_OUT[case])
    case(kind_of_host, world)
