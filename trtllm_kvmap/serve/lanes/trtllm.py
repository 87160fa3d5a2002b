"""TensorRT-LLM's own Triton model (`triton_backend/all_models/llmapi`) twice, each with one half of
the connector in its model.yaml. Read from upstream's sources, never run with them.
"""

from __future__ import annotations

import json

from trtllm_kvmap.serve.config_pbtxt import ModelConfig, TensorPort
from trtllm_kvmap.serve.settings import Served

CONNECTOR = "trtllm_kvmap.inject.trtllm.connector"
# What upstream's model.py reads by name and this deployment needs; it has more, all optional.
INPUTS = (
    TensorPort("text_input", "TYPE_STRING", (-1,)),
    TensorPort("streaming", "TYPE_BOOL", (1,), optional=True),
    TensorPort("sampling_param_temperature", "TYPE_FP32", (1,), optional=True),
    TensorPort("sampling_param_max_tokens", "TYPE_INT32", (1,), optional=True),
    TensorPort("sampling_param_stop", "TYPE_STRING", (-1,), optional=True),
    TensorPort("return_finish_reason", "TYPE_BOOL", (1,), optional=True),
    TensorPort("stop", "TYPE_BOOL", (1,), optional=True),
)
OUTPUTS = (
    TensorPort("text_output", "TYPE_STRING", (-1,)),
    TensorPort("finish_reason", "TYPE_STRING", (-1,)),
)
README = """\
# UNVERIFIED: TensorRT-LLM with a connector, under Triton

Written against upstream's sources; nothing of it has run with TensorRT-LLM.

1. Copy `model.py` and `helpers.py` of TensorRT-LLM's
   `triton_backend/all_models/llmapi/tensorrt_llm/1` into `source/1` and `target/1`.
2. In the target's copy, give `generate_async` the hand-over's `cache_salt`. Upstream's model passes
   none, and a request without a salt is a plain one: the connector offers it nothing and the target
   reads the prompt itself.
3. Name your module in `connector.json` (`blocks` and `exports`, see docs/lanes.md), put it on
   PYTHONPATH, and start with `TRTLLM_KVMAP_CONNECTOR` naming that file.

There is no `kvmap_pipeline` here: it would have to send salts, which step 2 makes possible.
"""


def trtllm_files(served: Served) -> dict[str, str]:
    """Path inside the repository -> text."""
    settings = {
        "kvmap": served.kvmap,
        "blocks": "your_module:BLOCKS",
        "exports": "your_module:EXPORTS",
        "first_tokens": served.config.first_tokens,
        "repair_window": served.config.repair_window,
        "backend": "cuda",
        "allow_unproven": served.allow_unproven,
    }
    files = {"README.md": README, "connector.json": json.dumps(settings, indent=2) + "\n"}
    for name, model, half in (
        ("source", served.source, "KvExport"),
        ("target", served.target, "KvMap"),
    ):
        files[f"{name}/config.pbtxt"] = ModelConfig(
            name, INPUTS, OUTPUTS, policies_elsewhere=True
        ).render()
        files[f"{name}/1/model.yaml"] = _model_yaml(model, half)
    return files


def _model_yaml(model: str, half: str) -> str:
    """Every key but triton_config goes to LLM(**kwargs). Written as JSON, which is YAML."""
    arguments = {
        "model": model,
        "backend": "pytorch",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        # What the connector's start-up checks ask for.
        "kv_cache_config": {"enable_block_reuse": True, "host_cache_size": 0},
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "kv_connector_config": {
            "connector_module": CONNECTOR,
            "connector_scheduler_class": f"{half}Scheduler",
            "connector_worker_class": f"{half}Worker",
        },
        "triton_config": {"max_batch_size": 0, "decoupled": True},
    }
    return json.dumps(arguments, indent=2) + "\n"
