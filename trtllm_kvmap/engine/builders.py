"""The builders with TensorRT under them: an engine of a model, and the engine of a map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trtllm_kvmap.artifact.kvmap import KvMap
from trtllm_kvmap.artifact.whole import whole_file
from trtllm_kvmap.engine import host
from trtllm_kvmap.engine.build import Versions
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.engine.host import trt
from trtllm_kvmap.engine.map_fields import MapNetwork, map_network
from trtllm_kvmap.engine.plan import EnginePlan
from trtllm_kvmap.engine.plugin_library import PLUGIN, plugin_creator
from trtllm_kvmap.engine.ports import CONSTANTS, OUTPUT, TABLE, Port, map_ports
from trtllm_kvmap.errors import UnavailableError

_DTYPES = {"int32": trt.int32, "int64": trt.int64, "float32": trt.float32}
_FIELD_TYPES = {
    "int32": trt.PluginFieldType.INT32,
    "int64": trt.PluginFieldType.INT64,
    "float32": trt.PluginFieldType.FLOAT32,
}


class TensorRtBuilders:
    """See build.Builders."""

    def versions(self) -> Versions:
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        return Versions(host.VERSION, host.TENSORRT_VERSION, card)

    def build_model(self, plan: EnginePlan, dtype: str, folder: Path) -> None:
        """Read the weights of a Hugging Face folder, compile, and write TensorRT-LLM's own files
        (config.json, rank0.engine).
        """
        model = host.automodel.AutoModelForCausalLM.from_hugging_face(
            hf_model_or_dir=str(plan.side.folder), dtype=dtype
        )
        plugins = host.plugin.PluginConfig()
        plugins.update_from_dict(plan.plugins)
        settings = dict(plan.build)
        if "speculative_decoding_mode" in settings:
            mode = host.modeling.SpeculativeDecodingMode.DRAFT_TOKENS_EXTERNAL
            settings["speculative_decoding_mode"] = mode
        build_config = host.builder.BuildConfig(**settings, plugin_config=plugins)
        engine = host.builder.build(model, build_config)
        engine.save(str(folder))

    def build_map(self, kvmap: KvMap, config: PipelineConfig, path: Path) -> None:
        """Compile the network of one KvMap layer, its weights as constants."""
        ports = map_ports(kvmap.source, kvmap.target, config, reads_token_ids=kvmap.reads_token_ids)
        serialized = _compile(map_network(kvmap, config), ports)
        with whole_file(path) as temporary:
            temporary.write_bytes(serialized)


def _compile(network_of: MapNetwork, ports: tuple[Port, ...]) -> bytes:
    creator = plugin_creator()
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    constants = {
        name: network.add_constant(shape=value.shape, weights=value).get_output(0)
        for name, value in network_of.constants.items()
    }
    given = [
        network.add_input(name=port.name, dtype=_DTYPES[port.dtype], shape=port.shape)
        for port in ports
    ]
    # The plugin's order: constants, what changes from call to call, the target's own table.
    inputs = [constants[name] for name in CONSTANTS] + given
    inputs += [constants[name] for name in TABLE if name in constants]
    plugin = creator.create_plugin(PLUGIN, _field_collection(network_of), trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise UnavailableError(
            "The plugin refused the map's fields; TensorRT's log, or stderr, says why."
        )
    layer = network.add_plugin_v3(inputs=inputs, shape_inputs=[], plugin=plugin)
    output = layer.get_output(0)
    output.name = OUTPUT
    network.mark_output(output)
    profile = builder.create_optimization_profile()
    for port in ports:
        if port.least != port.most:
            # Tuned for the longest sequence: short ones are bound by the map's weights.
            profile.set_shape(port.name, port.least, port.most, port.most)
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise UnavailableError("TensorRT could not build the map engine; its log says why.")
    return bytes(serialized)


def _field_collection(network_of: MapNetwork) -> Any:
    return trt.PluginFieldCollection(
        [
            trt.PluginField(name, np.ascontiguousarray(value), _FIELD_TYPES[str(value.dtype)])
            for name, value in network_of.fields.items()
        ]
    )
