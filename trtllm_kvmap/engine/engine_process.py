"""One engine of TensorRT-LLM at work: requests in, results out, with a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.host import tle
from trtllm_kvmap.engine.stages import POLL_SECONDS, CancelledError, Deadline
from trtllm_kvmap.errors import UnavailableError


def transceiver_config(config: PipelineConfig) -> Any:
    """The same for every peer: a whole sequence has room in the buffer of each."""
    return tle.CacheTransceiverConfig(
        backend=tle.CacheTransceiverBackendType.UCX,
        max_tokens_in_buffer=config.max_blocks * config.tokens_per_block,
    )


class Engine:
    """The executor of one engine folder; it starts a thread of its own in this process."""

    def __init__(self, folder: Path, config: PipelineConfig, max_tokens: int) -> None:
        blocks = -(-max_tokens // config.tokens_per_block)
        self._executor = tle.Executor(
            model_path=folder,
            model_type=tle.ModelType.DECODER_ONLY,
            executor_config=tle.ExecutorConfig(
                max_beam_width=1,
                max_batch_size=config.max_batch_size,
                max_num_tokens=config.max_num_tokens,
                kv_cache_config=tle.KvCacheConfig(
                    enable_block_reuse=True,
                    max_tokens=config.max_batch_size * blocks * config.tokens_per_block,
                ),
                cache_transceiver_config=transceiver_config(config),
            ),
        )

    def results(self, request: Any, deadline: Deadline, what: str) -> Iterator[Any]:
        """Run ``request``; its results as they come, the last of which is final.

        Raises UnavailableError when the engine reports an error or the time is up, CancelledError
        when the caller cancelled; the engine has then been told to stop.
        """
        number = self._executor.enqueue_request(request)
        ended = False
        try:
            while True:
                deadline.check(what)
                wait = timedelta(seconds=min(10 * POLL_SECONDS, deadline.left))
                for response in self._executor.await_responses(id=number, timeout=wait):
                    if response.has_error():
                        ended = True
                        raise UnavailableError(f"{what} failed: {response.error_msg}")
                    ended = bool(response.result.is_final)
                    yield response.result
                    if ended:
                        return
        finally:
            if not ended:
                self.cancel(number)

    def cancel(self, number: int) -> None:
        """Stop a request, also one that waits for a peer to fetch its KV."""
        self._executor.cancel_request(id=number)

    def shutdown(self) -> None:
        self._executor.shutdown()


def finish_reason(result: Any) -> str:
    """Why a final result is the last. Raises CancelledError for one that was cancelled."""
    reason = result.finish_reasons[0]
    if reason == tle.FinishReason.CANCELLED:
        raise CancelledError
    if reason == tle.FinishReason.TIMED_OUT:
        raise UnavailableError("The target's engine gave up on the request; see its log.")
    return "length" if reason == tle.FinishReason.LENGTH else "stop"
