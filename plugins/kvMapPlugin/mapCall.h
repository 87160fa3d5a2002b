// One enqueue: from TensorRT's tensors to a call of mapKvCache.
#pragma once

#include "kvMapConfig.h"
#include "ports.h"
#include "tensors.h"

namespace trtllm_kvmap::plugin
{

// Checks everything that can be known on the host, then enqueues; on bad input nothing is launched or written. The
// shapes of `tensors` have passed Ports::check.
Status enqueueMap(
    KvMapConfig const& config, PackedMap const& map, Ports const& ports, Tensors const& tensors, Stream stream);

// Most tokens that a call on inputs of these shapes can map.
int64_t maxTokens(KvMapConfig const& config, nvinfer1::Dims const& sourceKv);

} // namespace trtllm_kvmap::plugin
