"""The lane that runs anywhere: python models over transformers."""

from __future__ import annotations

import json
from dataclasses import replace

from trtllm_kvmap.serve.config_pbtxt import ModelConfig, TensorPort
from trtllm_kvmap.serve.settings import SPEEDS, Served

# Two processes, so that the source reads one prompt while the target answers another. Threads of
# one process will not do: with eight of them asking other models, the python backend of Triton 2.51
# aborted the server after some hundred requests.
PIPELINES = 2
TOKEN_IDS = TensorPort("token_ids", "TYPE_INT64", (-1,))
# Keys then values, layers, KV heads, tokens, head_dim.
KV_DIMS = (2, -1, -1, -1, -1)


def model_file(role: str) -> str:
    """A repository's model.py: the code itself stays in the installed package."""
    return (
        f'"""The model `{role}`: see trtllm_kvmap.serve.triton.{role}."""\n\n'
        f"from trtllm_kvmap.serve.triton.{role} import TritonPythonModel\n\n"
        f'__all__ = ["TritonPythonModel"]\n'
    )


def hf_files(served: Served) -> dict[str, str]:
    """Path inside the repository -> text."""
    config = served.config
    source = ModelConfig(
        name="source",
        inputs=(
            TOKEN_IDS,
            TensorPort("owner", "TYPE_STRING", (1,)),
            TensorPort("judged", "TYPE_INT64", (1,)),
        ),
        outputs=(
            TensorPort("source_kv", "TYPE_FP32", KV_DIMS),
            TensorPort("written_by", "TYPE_STRING", (1,)),
            TensorPort("held", "TYPE_INT64", (1,)),
        ),
        parameters={"model": served.source, "max_held_tokens": str(config.max_held_tokens)},
    )
    target = ModelConfig(
        name="target",
        inputs=(
            TOKEN_IDS,
            TensorPort("job", "TYPE_STRING", (1,)),
            TensorPort("source_kv", "TYPE_FP32", KV_DIMS, optional=True),
            TensorPort("written_by", "TYPE_STRING", (1,), optional=True),
        ),
        outputs=(TensorPort("event", "TYPE_STRING", (1,)),),
        parameters={
            "model": served.target,
            "kvmap": served.kvmap,
            "allow_unproven": "true" if served.allow_unproven else "false",
            "traffic": config.traffic,
            "traffic_share": str(config.traffic_share),
        },
        decoupled=True,
    )
    pipeline = ModelConfig(
        name="kvmap_pipeline",
        inputs=(TensorPort("request", "TYPE_STRING", (1,)),),
        outputs=(TensorPort("response", "TYPE_STRING", (1,)),),
        parameters={
            "target": served.target,
            "kvmap": served.kvmap,
            "mapper_id": served.mapper_id,
            "first_tokens": str(config.first_tokens),
            "repair_window": str(config.repair_window),
        },
        decoupled=True,
        instances=PIPELINES,
    )
    # Of all that Triton serves over HTTP, only `infer` hands headers to a model, and `infer` serves
    # no model with several responses.
    whole = replace(pipeline, name="kvmap_whole", decoupled=False, instances=1)
    files = {}
    roles = {"source": source, "target": target, "pipeline": pipeline, "whole": whole}
    for role, model in roles.items():
        files[f"{model.name}/config.pbtxt"] = model.render()
        files[f"{model.name}/1/model.py"] = model_file(role)
    if served.speeds is not None:
        for model in (pipeline, whole):
            files[f"{model.name}/{SPEEDS}"] = json.dumps(served.speeds.to_json(), indent=2) + "\n"
    return files
