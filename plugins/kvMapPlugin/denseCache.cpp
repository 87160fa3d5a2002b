#include "denseCache.h"

#include "cacheDtype.h"

namespace trtllm_kvmap::plugin
{

PoolView viewDenseCache(
    ModelShape const& shape, DType dtype, float const* scales, int64_t numSequences, int64_t numTokens, void* data)
{
    PoolView view{};
    view.channelStride = 1;
    view.tokenStride = shape.headDim;
    view.headStride = numTokens * shape.headDim;
    int64_t const fieldStride = shape.numKvHeads * view.headStride;
    view.blockStride = 2 * shape.numLayers * fieldStride;
    view.numBlocks = static_cast<int32_t>(numSequences);
    view.numLayers = shape.numLayers;
    view.numKvHeads = shape.numKvHeads;
    view.tokensPerBlock = static_cast<int32_t>(numTokens);
    view.headDim = shape.headDim;
    view.dtype = dtype;
    for (int32_t field = 0; field < 2; ++field)
    {
        view.scale[field] = scales[field];
        for (int32_t layer = 0; layer < shape.numLayers; ++layer)
        {
            view.layers[field][layer] = static_cast<char*>(data) + (2 * layer + field) * fieldStride * bytesOf(dtype);
        }
    }
    return view;
}

int64_t denseCacheBytes(PoolView const& view)
{
    return view.numBlocks * view.blockStride * bytesOf(view.dtype);
}

} // namespace trtllm_kvmap::plugin
