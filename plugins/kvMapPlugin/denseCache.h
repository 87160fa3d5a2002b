// A dense KV tensor [numSequences, numLayers, 2 (key, value), numKvHeads, numTokens, headDim]: a pool of one block per
// sequence.
#pragma once

#include <trtllm_kvmap/mapKvCache.h>

namespace trtllm_kvmap::plugin
{

PoolView viewDenseCache(
    ModelShape const& shape, DType dtype, float const* scales, int64_t numSequences, int64_t numTokens, void* data);

// Bytes of the whole tensor.
int64_t denseCacheBytes(PoolView const& view);

} // namespace trtllm_kvmap::plugin
