"""vLLM's own engine as a Host of the connector's cases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from connector_cases import Answer, Ask
from connector_world import FIRST_TOKENS, REPAIR_WINDOW
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

TOKENS_PER_BLOCK = 32  # what its CPU backend allows


def connector(policy: str = "recompute", **settings: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KvMapConnector",
        kv_connector_module_path="trtllm_kvmap.inject.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=settings,
    )


def target_settings(kvmap: Path) -> dict[str, Any]:
    return {
        "kvmap": str(kvmap),
        "blocks": "vllm_blocks:BLOCKS",
        "exports": "vllm_blocks:EXPORTS",
        "first_tokens": FIRST_TOKENS,
        "repair_window": REPAIR_WINDOW,
        "allow_unproven": True,
    }


class VllmHost:
    """One engine; close() it before the next one is made in the same process."""

    tokens_per_block = TOKENS_PER_BLOCK

    def __init__(
        self,
        model: Path,
        config: KVTransferConfig,
        *,
        step_tokens: int = 1024,
        num_blocks: int = 128,
    ) -> None:
        self.engine = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=TOKENS_PER_BLOCK,
            max_model_len=400,
            max_num_seqs=8,
            max_num_batched_tokens=step_tokens,
            kv_cache_memory_bytes=24 << 20,
            num_gpu_blocks_override=num_blocks,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=config,
        ).llm_engine
        self._asked = 0

    def run(self, asks: Sequence[Ask], **sampling: Any) -> list[Answer]:
        wanted = {}
        for ask in asks:
            prompt: dict[str, Any] = {"prompt_token_ids": ask.token_ids}
            if ask.salt is not None:
                prompt["cache_salt"] = ask.salt
            params = {"handoff": ask.handoff} if ask.handoff is not None else None
            wanted[self._add(prompt, ask.steps, params, sampling)] = ask
        outputs = self._drain(wanted)
        return [
            Answer(
                list(out.outputs[0].token_ids),
                (out.kv_transfer_params or {}).get("kvmap"),
                self._cached(out),
            )
            for out in (outputs[request_id] for request_id in wanted)
        ]

    def export(self, token_ids: list[int], name: str) -> list[int]:
        """Keep the KV of ``token_ids`` under ``name``; returns one token of answer."""
        request_id = self._add({"prompt_token_ids": token_ids}, 1, {"export": name}, {})
        return list(self._drain({request_id: None})[request_id].outputs[0].token_ids)

    def forget(self) -> None:
        assert self.engine.reset_prefix_cache()

    def preemptions(self) -> int:
        return sum(m.value for m in self.engine.get_metrics() if m.name == "vllm:num_preemptions")

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _add(
        self, prompt: dict[str, Any], steps: int, params: Any, sampling: dict[str, Any]
    ) -> str:
        self._asked += 1
        request_id = f"ask-{self._asked}"
        options = SamplingParams(
            temperature=0,
            max_tokens=steps,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
            **sampling,
        )
        self.engine.add_request(request_id, prompt, options)
        return request_id

    def _drain(self, wanted: dict[str, Ask | None]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                outputs[out.request_id] = out
                ask = wanted[out.request_id]
                emitted = len(out.outputs[0].token_ids)
                if ask is not None and ask.cancel_after == emitted and not out.finished:
                    self.engine.abort_request([out.request_id])
        return outputs

    def _cached(self, output: Any) -> int:
        """vLLM counts tokens that a connector brings as cached, even when their load failed."""
        status = (output.kv_transfer_params or {}).get("kvmap")
        if status is not None:
            return status["already_exact"] + status["already_approximate"]
        return int(output.num_cached_tokens or 0)
