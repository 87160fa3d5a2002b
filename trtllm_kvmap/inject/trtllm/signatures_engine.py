"""Every name of ``tensorrt_llm`` and ``tensorrt`` that the engine lane uses, as signatures.py lists
those of the connector lane.

Most are bound from C++: the file is then the binding's, and the parameters are those given by name,
or, where the binding names none, by position. A commit is one of the file's own history; the tag of
1.2.1 could not be read. Where a file's texts differ, the list follows the one from before the
engines were removed.
"""

from __future__ import annotations

from trtllm_kvmap.inject.trtllm.signatures import Attributes, Method, Read

TRTLLM = (1, 2)  # 1.2.1 is the last stable release with engines
TENSORRT = (10, 14)

PACKAGE = Read(
    "tensorrt_llm", "tensorrt_llm/version.py", "000a01de66f0eab4ab05640711f0253f50f5209c"
)
_BUILDER = Read(
    "tensorrt_llm.builder",
    "tensorrt_llm/builder.py",
    "008b2b8d23af95e4e19fa6f354f9c5f6349b2bfc",
)
_PLUGIN = Read(
    "tensorrt_llm.plugin",
    "tensorrt_llm/plugin/plugin.py",
    "035b99e0d09d4f2dfdb949810cf7245112aa4165",
)
_AUTOMODEL = Read(
    "tensorrt_llm.models.automodel",
    "tensorrt_llm/models/automodel.py",
    "16d2467ea8e3b45d7d9555010c2ad018d006d5c1",
)
_MODES = Read("tensorrt_llm.models.modeling_utils", "tensorrt_llm/commands/build.py", None)
_BINDINGS = Read(
    "tensorrt_llm.bindings",
    "tensorrt_llm/_torch/pyexecutor/kv_cache_transceiver.py",
    "00620eb025e7c24895986e1042380bd1be4426d9",
)
_EXECUTOR = Read(
    "tensorrt_llm.bindings.executor",
    "cpp/tensorrt_llm/nanobind/executor/executor.cpp",
    "1dd50d0741fa3bdae3ffd2f54e53547cbe1a043d",
)
_CONFIGS = Read(
    "tensorrt_llm.bindings.executor", "cpp/tensorrt_llm/nanobind/executor/executorConfig.cpp", None
)
_REQUEST = Read(
    "tensorrt_llm.bindings.executor",
    "cpp/tensorrt_llm/nanobind/executor/request.cpp",
    "008b2b8d23af95e4e19fa6f354f9c5f6349b2bfc",
)
_MANAGER = Read(
    "tensorrt_llm.bindings.internal.batch_manager",
    "cpp/tensorrt_llm/nanobind/batch_manager/kvCacheManager.cpp",
    "00825c4ee813bdc5eb2e5cf218b644b8c18ce2ec",
)
_TRANSCEIVER = Read(
    "tensorrt_llm.bindings.internal.batch_manager",
    "cpp/tensorrt_llm/nanobind/batch_manager/cacheTransceiver.cpp",
    "01edceae1757b6d77dd9129d14e73b93fb1d2a3d",
)
_LLM_REQUEST = Read(
    "tensorrt_llm.bindings.internal.batch_manager",
    "cpp/tensorrt_llm/nanobind/batch_manager/bindings.cpp",
    "0159d90588fdaf111f0e571e4297ecc88a6c689e",
)
# github.com/NVIDIA/TensorRT, its Python bindings.
_TRT_GRAPH = Read("tensorrt", "python/src/infer/pyGraph.cpp", None)
_TRT_CORE = Read("tensorrt", "python/src/infer/pyCore.cpp", None)
_TRT_PLUGIN = Read("tensorrt", "python/src/infer/pyPlugin.cpp", None)


def _methods(read: Read, owner: str, **methods: str) -> tuple[Method, ...]:
    return tuple(
        Method(read, owner, "__init__" if name == "init" else name, tuple(given.split()))
        for name, given in methods.items()
    )


METHODS = (
    # Building
    *_methods(
        _BUILDER,
        "BuildConfig",
        init="max_batch_size max_input_len max_seq_len max_num_tokens max_beam_width "
        "speculative_decoding_mode max_draft_len plugin_config",
    ),
    *_methods(_BUILDER, "", build="model build_config"),
    *_methods(_BUILDER, "Engine", save="engine_dir"),
    *_methods(_PLUGIN, "PluginConfig", init="", update_from_dict="config"),
    *_methods(_AUTOMODEL, "AutoModelForCausalLM", from_hugging_face="hf_model_or_dir dtype"),
    # Executors
    *_methods(
        _EXECUTOR,
        "Executor",
        init="model_path model_type executor_config",
        enqueue_request="request",
        await_responses="id timeout",
        cancel_request="id",
        shutdown="",
    ),
    *_methods(
        _CONFIGS,
        "ExecutorConfig",
        init="max_beam_width kv_cache_config max_batch_size max_num_tokens "
        "cache_transceiver_config",
    ),
    *_methods(_CONFIGS, "KvCacheConfig", init="enable_block_reuse max_tokens"),
    *_methods(_CONFIGS, "CacheTransceiverConfig", init="backend max_tokens_in_buffer"),
    *_methods(
        _REQUEST,
        "Request",
        init="input_token_ids max_tokens streaming output_config end_id "
        "external_draft_tokens_config type context_phase_params cache_salt_id",
    ),
    *_methods(_REQUEST, "OutputConfig", init="exclude_input_from_output return_perf_metrics"),
    *_methods(_REQUEST, "ExternalDraftTokensConfig", init="tokens"),
    # The binding names none of these: first_gen_tokens, req_id, opaque_state, draft_tokens.
    *_methods(_REQUEST, "ContextPhaseParams", init=""),
    *_methods(_REQUEST, "Response", has_error=""),
    # The relay
    *_methods(
        _MANAGER,
        "KVCacheManager",
        init="num_kv_heads_per_layer size_per_head tokens_per_block blocks_per_window "
        "max_num_sequences max_beam_width max_attention_window_vec "
        "temp_attention_window_inputs dtype sink_token_length stream max_sequence_length "
        "enable_block_reuse",
        allocate_pools="",
        release_pools="",
        add_sequence="",
        remove_sequence="",
        get_block_pool_pointers="",
        get_layer_to_pool_mapping="",
        get_primary_pool_data="",
        get_batch_cache_block_ids="",
        copy_block_offsets="",
    ),
    *_methods(
        _TRANSCEIVER,
        "CacheTransceiver",
        init="cache_manager num_kv_heads_per_layer size_per_head tokens_per_block world_config "
        "attention_layer_num_per_pp dtype attention_type cache_transceiver_config",
        respond_and_send_async="",
        request_and_receive_async="",
        check_context_transfer_status="",
        check_gen_transfer_status="",
        cancel_request="",
    ),
    *_methods(
        _LLM_REQUEST,
        "LlmRequest",
        init="request_id max_new_tokens input_tokens sampling_config is_streaming "
        "llm_request_type context_phase_params",
    ),
    *_methods(
        _BINDINGS, "WorldConfig", init="tensor_parallelism pipeline_parallelism rank gpus_per_node"
    ),
    *_methods(_BINDINGS, "SamplingConfig", init="beam_width"),
    # TensorRT
    *_methods(_TRT_CORE, "Logger", init=""),
    *_methods(
        _TRT_CORE,
        "Builder",
        init="logger",
        create_network="flags",
        create_builder_config="",
        create_optimization_profile="",
        build_serialized_network="network config",
    ),
    *_methods(_TRT_CORE, "IBuilderConfig", add_optimization_profile="profile"),
    *_methods(_TRT_CORE, "IOptimizationProfile", set_shape="input min opt max"),
    *_methods(
        _TRT_GRAPH,
        "INetworkDefinition",
        add_input="name dtype shape",
        add_constant="shape weights",
        add_plugin_v3="inputs shape_inputs plugin",
        mark_output="tensor",
    ),
    *_methods(_TRT_GRAPH, "ILayer", get_output="index"),
    *_methods(_TRT_PLUGIN, "", get_plugin_registry=""),
    *_methods(
        _TRT_PLUGIN,
        "IPluginRegistry",
        load_library="plugin_path",
        get_creator="type version plugin_namespace",
    ),
    *_methods(_TRT_PLUGIN, "IPluginCreatorV3One", create_plugin="name field_collection phase"),
    *_methods(_TRT_PLUGIN, "PluginField", init="name data type"),
    *_methods(_TRT_PLUGIN, "PluginFieldCollection", init=""),
    *_methods(_TRT_CORE, "Runtime", init="logger", deserialize_cuda_engine="serialized_engine"),
    *_methods(_TRT_CORE, "ICudaEngine", create_execution_context=""),
    *_methods(
        _TRT_CORE,
        "IExecutionContext",
        set_input_shape="name shape",
        set_tensor_address="name memory",
        execute_async_v3="stream_handle",
    ),
)
ATTRIBUTES = (
    Attributes(_MODES, "SpeculativeDecodingMode", ("DRAFT_TOKENS_EXTERNAL", "NONE")),
    Attributes(_EXECUTOR, "ModelType", ("DECODER_ONLY",)),
    Attributes(_CONFIGS, "CacheTransceiverBackendType", ("UCX",)),
    Attributes(
        _REQUEST,
        "RequestType",
        (
            "REQUEST_TYPE_CONTEXT_ONLY",
            "REQUEST_TYPE_GENERATION_ONLY",
            "REQUEST_TYPE_CONTEXT_AND_GENERATION",
        ),
    ),
    Attributes(_REQUEST, "FinishReason", ("END_ID", "LENGTH", "CANCELLED", "TIMED_OUT")),
    Attributes(_REQUEST, "ContextPhaseParams", ("req_id", "opaque_state")),
    Attributes(_REQUEST, "Response", ("error_msg", "result")),
    Attributes(
        _REQUEST,
        "Result",
        (
            "is_final",
            "output_token_ids",
            "finish_reasons",
            "context_phase_params",
            "request_perf_metrics",
        ),
    ),
    Attributes(_REQUEST, "RequestPerfMetrics", ("kv_cache_metrics",)),
    Attributes(_REQUEST, "KvCacheMetrics", ("num_reused_blocks",)),
    Attributes(_MANAGER, "KVCacheManager", ("max_blocks_per_seq",)),
    Attributes(_TRANSCEIVER, "AttentionType", ("DEFAULT",)),
    Attributes(
        _LLM_REQUEST,
        "LlmRequestType",
        ("LLMREQUEST_TYPE_CONTEXT_ONLY", "LLMREQUEST_TYPE_GENERATION_ONLY"),
    ),
    Attributes(
        _LLM_REQUEST,
        "LlmRequest",
        (
            "context_phase_params",
            "is_disagg_generation_transmission_complete",
            "is_disagg_context_complete_state",
        ),
    ),
    Attributes(_BINDINGS, "DataType", ("BF16", "HALF")),
    Attributes(_TRT_CORE, "Logger", ("WARNING",)),
    Attributes(_TRT_CORE, "NetworkDefinitionCreationFlag", ("STRONGLY_TYPED",)),
    Attributes(_TRT_GRAPH, "ITensor", ("name",)),
    Attributes(_TRT_PLUGIN, "PluginFieldType", ("INT32", "INT64", "FLOAT32")),
    Attributes(_TRT_PLUGIN, "TensorRTPhase", ("BUILD",)),
    # Modules have no owner: names of the package itself.
    Attributes(_TRT_CORE, "", ("int32", "int64", "float32", "__version__")),
    Attributes(PACKAGE, "", ("__version__",)),
)
