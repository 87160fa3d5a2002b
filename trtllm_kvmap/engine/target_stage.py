"""The target: an executor that takes mapped KV in and answers.

Two requests make one answer. The first is a generation-only one: its context phase was "done" by
the relay, so the engine fetches the KV of the mapped tokens and, when the request ends, commits the
blocks to its reuse tree. Its single step of decoding is thrown away. The second is an ordinary
request for the whole prompt. Under the same salt it finds those blocks and computes what follows
them: the repair window, and the first token of the answer, which is the target's own choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.engine_process import Engine, finish_reason
from trtllm_kvmap.engine.host import tle
from trtllm_kvmap.engine.stages import ContextState, Deadline, Piece

# The token that follows in the prompt stands for the one a context phase would have sampled; one
# more is decoded, because a request of no new tokens is refused.
LANDING_TOKENS = 2


class EngineTarget:
    """See stages.TargetStage."""

    def __init__(self, engine: Engine, config: PipelineConfig) -> None:
        self._engine, self._config = engine, config

    def land(
        self,
        token_ids: Sequence[int],
        next_token: int,
        state: ContextState,
        salt: int,
        deadline: Deadline,
    ) -> None:
        params = tle.ContextPhaseParams([next_token], state.request_id, state.opaque, None)
        request = tle.Request(
            input_token_ids=list(token_ids),
            max_tokens=LANDING_TOKENS,
            streaming=False,
            output_config=tle.OutputConfig(exclude_input_from_output=True),
            type=tle.RequestType.REQUEST_TYPE_GENERATION_ONLY,
            context_phase_params=params,
            cache_salt_id=salt,
        )
        for _ in self._engine.results(request, deadline, "The target's taking of mapped KV"):
            pass

    def answer(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        end_id: int | None,
        draft_token_ids: Sequence[int],
        salt: int | None,
        deadline: Deadline,
    ) -> Iterator[Piece]:
        drafts = tle.ExternalDraftTokensConfig(tokens=list(draft_token_ids))
        request = tle.Request(
            input_token_ids=list(token_ids),
            max_tokens=max_tokens,
            streaming=True,
            output_config=tle.OutputConfig(
                exclude_input_from_output=True, return_perf_metrics=True
            ),
            end_id=end_id,
            external_draft_tokens_config=drafts if draft_token_ids else None,
            type=tle.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION,
            cache_salt_id=salt,
        )
        for result in self._engine.results(request, deadline, "The target's answer"):
            tokens = tuple(result.output_token_ids[0])
            if result.is_final:
                yield Piece(tokens, finish_reason(result), self._reused_tokens(result))
            else:
                yield Piece(tokens)

    def _reused_tokens(self, result: Any) -> int | None:
        """Prompt tokens that lay in the engine's cache; None where it does not say."""
        metrics = result.request_perf_metrics
        if metrics is None:
            return None
        return int(metrics.kv_cache_metrics.num_reused_blocks) * self._config.tokens_per_block
