"""A FAKE of the names of TensorRT-LLM that build and run engines, with a real model behind each.

An "engine" is the path of a model's folder. The executor computes with transformers on a paged
FakeKvCache: context-only requests keep their blocks until they are fetched, generation-only ones
fetch them, and whatever a request has computed is committed to a reuse tree under its salt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_relay
import fake_tensorrt
from fake_engine_world import WORLD, Offered
from fake_kv_cache import FakeKvCache
from paged_target import PagedTarget, Work

from trtllm_kvmap.models import LoadedModel, load_model
from trtllm_kvmap.spec.layout import BlockTable

__version__ = "1.2.1"


class SpeculativeDecodingMode:
    NONE, DRAFT_TOKENS_EXTERNAL = "none", "draft_tokens_external"


class PluginConfig:
    def __init__(self):
        self._settings = {}

    def update_from_dict(self, config):
        self._settings.update(config)


@dataclass
class BuildConfig:
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int
    plugin_config: PluginConfig
    speculative_decoding_mode: str = SpeculativeDecodingMode.NONE
    max_draft_len: int = 0


class AutoModelForCausalLM:
    @staticmethod
    def from_hugging_face(hf_model_or_dir, dtype="auto"):
        return Path(hf_model_or_dir), dtype


class Engine:
    def __init__(self, model, build_config):
        self._model, self._config = model, build_config

    def save(self, engine_dir):
        Path(engine_dir).mkdir()
        settings = {**vars(self._config), "plugin_config": self._config.plugin_config._settings}
        (Path(engine_dir) / "config.json").write_text(json.dumps(settings))
        (Path(engine_dir) / "rank0.engine").write_text(f"FAKE\n{self._model[0]}\n{self._model[1]}")


def build(model, build_config):
    return Engine(model, build_config)


class ModelType:
    DECODER_ONLY = "decoder"


class CacheTransceiverBackendType:
    UCX = "UCX"


class RequestType:
    REQUEST_TYPE_CONTEXT_ONLY = "context"
    REQUEST_TYPE_GENERATION_ONLY = "generation"
    REQUEST_TYPE_CONTEXT_AND_GENERATION = "both"


class FinishReason:
    END_ID, LENGTH, CANCELLED, TIMED_OUT = "end", "length", "cancelled", "timed out"


@dataclass
class WorldConfig:
    tensor_parallelism: int
    pipeline_parallelism: int
    rank: int
    gpus_per_node: int


@dataclass
class SamplingConfig:
    beam_width: int


class DataType:
    BF16, HALF = "bf16", "half"


@dataclass
class CacheTransceiverConfig:
    backend: str
    max_tokens_in_buffer: int


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool
    max_tokens: int


@dataclass
class ExecutorConfig:
    max_beam_width: int
    kv_cache_config: KvCacheConfig
    max_batch_size: int
    max_num_tokens: int
    cache_transceiver_config: CacheTransceiverConfig


@dataclass
class OutputConfig:
    exclude_input_from_output: bool = False
    return_perf_metrics: bool = False


@dataclass
class ExternalDraftTokensConfig:
    tokens: list[int]


class ContextPhaseParams:
    req_id: int
    opaque_state: bytes | None

    def __init__(self, first_gen_tokens, req_id, opaque_state, draft_tokens, /):
        self._first, self.req_id, self.opaque_state = first_gen_tokens, req_id, opaque_state


ContextPhaseParams.req_id = ContextPhaseParams.opaque_state = None  # type: ignore[assignment]


@dataclass
class Request:
    input_token_ids: list[int]
    max_tokens: int
    streaming: bool = False
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    external_draft_tokens_config: ExternalDraftTokensConfig | None = None
    type: str = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    context_phase_params: ContextPhaseParams | None = None
    cache_salt_id: int | None = None


@dataclass
class KvCacheMetrics:
    num_reused_blocks: int = 0


@dataclass
class RequestPerfMetrics:
    kv_cache_metrics: KvCacheMetrics | None = None


@dataclass
class Result:
    is_final: bool = False
    output_token_ids: list[list[int]] | None = None
    finish_reasons: list[str] | None = None
    context_phase_params: ContextPhaseParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None


@dataclass
class Response:
    result: Result | None = None
    error_msg: str | None = None

    def has_error(self):
        return self.error_msg is not None


@dataclass
class _Running:
    request_id: int
    prompt_len: int
    tokens: list[int]


@lru_cache(maxsize=8)
def _model_of(folder: str) -> LoadedModel:
    return load_model(folder)


class Executor:
    """Does one step of a request each time its responses are awaited."""

    _started: tuple[Any, ...] = ()

    def __init__(self, model_path, model_type, executor_config):
        self._settings = json.loads((Path(model_path) / "config.json").read_text())
        folder = (Path(model_path) / "rank0.engine").read_text().splitlines()[1]
        config, loaded = executor_config.kv_cache_config, _model_of(folder)
        assert config.enable_block_reuse
        self._size = self._settings["plugin_config"]["tokens_per_block"]
        self._cache = FakeKvCache(loaded.spec, config.max_tokens // self._size, self._size)
        layers, heads, head_dim = loaded.spec.kv_shape
        self._shape = layers, heads, self._size, head_dim
        self._model, self._numbers = PagedTarget(loaded, self._cache.blocks), count(1)
        self._running: dict[int, Iterator[Response]] = {}
        self._offered: dict[int, bytes] = {}
        Executor._started += (self,)

    def enqueue_request(self, request):
        number = next(self._numbers)
        steps = {
            RequestType.REQUEST_TYPE_CONTEXT_ONLY: self._context,
            RequestType.REQUEST_TYPE_GENERATION_ONLY: self._generation,
            RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION: self._both,
        }
        drafts = request.external_draft_tokens_config
        assert drafts is None or len(drafts.tokens) <= self._settings["max_draft_len"]
        running = _Running(number, len(request.input_token_ids), list(request.input_token_ids))
        self._running[number] = steps[request.type](request, running)
        return number

    def await_responses(self, id, timeout):
        try:
            response = next(self._running[id], None)
        except Exception as error:  # the engine reports it, and lives on
            self._running[id] = iter(())
            return [Response(error_msg=str(error))]
        return [] if response is None else [response]

    def cancel_request(self, id):
        self._running.pop(id, None)
        if (offered := WORLD.offers.pop(self._offered.get(id, b""), None)) is not None:
            offered.taken()

    def shutdown(self):
        self._running.clear()

    def _read(self, running: _Running, salt: object) -> tuple[int, int]:
        """Compute the prompt; (tokens found in the cache, the token that follows)."""
        found = self._cache.add_sequence(running, salt, running.prompt_len)
        return found, self._step(running, found)

    def _step(self, running: _Running, first: int) -> int:
        self._cache.grow(running, len(running.tokens))
        table = BlockTable(tuple(self._cache.get_cache_indices(running)), self._size)
        work = Work(running.tokens[first:], first, table)
        (logits,) = self._model.forward([work], lambda layer: None, lambda layer: None)
        return int(logits.argmax())

    def _end(self, running: _Running, computed: int) -> None:
        self._cache.store_blocks(running, computed)
        self._cache.remove_sequence(running)

    def _context(self, request: Request, running: _Running) -> Iterator[Response]:
        _, token = self._read(running, request.cache_salt_id)
        blocks = self._cache.get_cache_indices(running)
        offered = Offered(
            self._shape,
            lambda: self._cache.blocks[blocks],
            lambda: self._end(running, running.prompt_len),
        )
        state = self._offered[running.request_id] = WORLD.offer("source", offered)
        params = ContextPhaseParams([token], running.request_id, state, None)
        yield Response(Result(True, [[token]], [FinishReason.LENGTH], params))

    def _generation(self, request: Request, running: _Running) -> Iterator[Response]:
        while "target" in WORLD.stalled:
            yield Response(Result())
        params = request.context_phase_params
        self._cache.add_sequence(running, request.cache_salt_id, running.prompt_len)
        into = self._cache.blocks[self._cache.get_cache_indices(running)]
        WORLD.fetch(params.opaque_state, self._shape, into)
        self._cache.blocks[self._cache.get_cache_indices(running)] = into
        running.tokens += params._first
        while len(running.tokens) - running.prompt_len < request.max_tokens:
            running.tokens.append(self._step(running, len(running.tokens) - 1))
        self._end(running, len(running.tokens) - 1)
        yield Response(Result(True, [running.tokens[running.prompt_len :]], [FinishReason.LENGTH]))

    def _both(self, request: Request, running: _Running) -> Iterator[Response]:
        found, token = self._read(running, request.cache_salt_id)
        metrics = RequestPerfMetrics(KvCacheMetrics(found // self._size))
        for index in range(request.max_tokens):
            running.tokens.append(token)
            ended = token == request.end_id
            if ended or index + 1 == request.max_tokens:
                self._end(running, len(running.tokens) - 1)
                reason = FinishReason.END_ID if ended else FinishReason.LENGTH
                yield Response(Result(True, [[token]], [reason], None, metrics))
                return
            yield Response(Result(False, [[token]], [FinishReason.LENGTH]))
            token = self._step(running, len(running.tokens) - 1)


CONTENTS = {
    "tensorrt_llm": {"__version__": __version__},
    "tensorrt_llm.builder": {"BuildConfig": BuildConfig, "Engine": Engine, "build": build},
    "tensorrt_llm.plugin": {"PluginConfig": PluginConfig},
    "tensorrt_llm.models.automodel": {"AutoModelForCausalLM": AutoModelForCausalLM},
    "tensorrt_llm.models.modeling_utils": {"SpeculativeDecodingMode": SpeculativeDecodingMode},
    "tensorrt_llm.bindings": {
        "WorldConfig": WorldConfig,
        "SamplingConfig": SamplingConfig,
        "DataType": DataType,
    },
    "tensorrt_llm.bindings.executor": {
        cls.__name__: cls
        for cls in (
            Executor,
            ExecutorConfig,
            KvCacheConfig,
            CacheTransceiverConfig,
            CacheTransceiverBackendType,
            ModelType,
            Request,
            RequestType,
            OutputConfig,
            ExternalDraftTokensConfig,
            ContextPhaseParams,
            Response,
            Result,
            RequestPerfMetrics,
            KvCacheMetrics,
            FinishReason,
        )
    },
    "tensorrt_llm.bindings.internal.batch_manager": {
        cls.__name__: cls
        for cls in (
            fake_relay.KVCacheManager,
            fake_relay.CacheTransceiver,
            fake_relay.LlmRequest,
            fake_relay.LlmRequestType,
            fake_relay.AttentionType,
        )
    },
}


def make_engine_modules() -> dict[str, ModuleType]:
    """The fake packages, by module name."""
    modules: dict[str, ModuleType] = {"tensorrt": fake_tensorrt}
    for name, values in CONTENTS.items():
        modules[name] = ModuleType(name, "A FAKE for tests.")
        modules[name].__dict__.update(values, __file__=__file__)
    return modules
