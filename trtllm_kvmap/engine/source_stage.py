"""The source: an executor that reads and generates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_kvmap.engine.engine_process import Engine
from trtllm_kvmap.engine.host import tle
from trtllm_kvmap.engine.stages import ContextState, Deadline
from trtllm_kvmap.errors import UnavailableError


class EngineSource:
    """See stages.SourceStage. The engine holds what it read until a peer has taken it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read(self, token_ids: Sequence[int], salt: int, deadline: Deadline) -> ContextState:
        request = tle.Request(
            input_token_ids=list(token_ids),
            max_tokens=1,
            streaming=False,
            output_config=tle.OutputConfig(exclude_input_from_output=True),
            type=tle.RequestType.REQUEST_TYPE_CONTEXT_ONLY,
            # The source's own KV is exact; the salt keeps one tenant's prompts from another's.
            cache_salt_id=salt,
        )
        *_, last = self._engine.results(request, deadline, "The source's reading")
        params = last.context_phase_params
        if params is None or params.opaque_state is None:
            raise UnavailableError(
                "The source has read the prompt but offers no KV; was its executor started with a "
                "cache transceiver?"
            )
        return ContextState(int(params.req_id), bytes(params.opaque_state))

    def forget(self, state: ContextState) -> None:
        self._engine.cancel(state.request_id)
