// What can be known before anything is launched or written, each refusal one sentence.

#include "kernels/checkCall.h"
#include "kernels/status.h"
#include "kernels/workspaceLayout.h"

#include <cmath>

namespace trtllm_kvmap
{
namespace
{

template <typename... Arguments>
Status refuse(char const* format, Arguments... arguments)
{
    return makeStatus(StatusCode::kINVALID_ARGUMENT, format, arguments...);
}

bool isAligned(void const* pointer, uintptr_t alignment)
{
    return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

Status checkMap(PackedMap const& map)
{
    if (map.version != kPackedMapVersion)
    {
        return refuse("The packed map has version %d; this build reads %d. Pack the map again.", map.version,
            kPackedMapVersion);
    }
    bool const products = isKnown(map.computeType) && map.computeType != DType::kFP8_E4M3;
    if (!products || (map.weightType != map.computeType && map.weightType != DType::kFP8_E4M3))
    {
        return refuse("The packed map multiplies in type %d and keeps weights in type %d, which no packMap wrote; pack "
                      "the map again.",
            static_cast<int32_t>(map.computeType), static_cast<int32_t>(map.weightType));
    }
    if (!map.blob || !isAligned(map.blob, 64))
    {
        return refuse("The packed map's buffer is at %p; an address aligned to 64 bytes is needed.", map.blob);
    }
    return okStatus();
}

Status checkPool(char const* what, PoolView const& pool, ModelShape const& shape)
{
    if (pool.numLayers != shape.numLayers || pool.numKvHeads != shape.numKvHeads || pool.headDim != shape.headDim)
    {
        return refuse("The %s pool holds (layers, KV heads, head_dim) = (%d, %d, %d); the map needs (%d, %d, %d).",
            what, pool.numLayers, pool.numKvHeads, pool.headDim, shape.numLayers, shape.numKvHeads, shape.headDim);
    }
    if (!isKnown(pool.dtype))
    {
        return refuse("The %s pool's dtype is %d; use float32, float16, bfloat16 or fp8-e4m3.", what,
            static_cast<int32_t>(pool.dtype));
    }
    if (pool.numBlocks < 1 || pool.tokensPerBlock < 1)
    {
        return refuse("The %s pool has %d blocks of %d tokens; at least one of one is needed.", what, pool.numBlocks,
            pool.tokensPerBlock);
    }
    if (pool.blockStride < 0 || pool.headStride < 0 || pool.tokenStride < 0 || pool.channelStride < 1)
    {
        return refuse("The %s pool's strides (block, head, token, channel) are (%lld, %lld, %lld, %lld); they may not "
                      "be negative, and the last must be positive.",
            what, static_cast<long long>(pool.blockStride), static_cast<long long>(pool.headStride),
            static_cast<long long>(pool.tokenStride), static_cast<long long>(pool.channelStride));
    }
    for (int32_t field = 0; field < 2; ++field)
    {
        if (!(pool.scale[field] > 0.0f && std::isfinite(pool.scale[field])))
        {
            return refuse("The %s pool's %s scale is %g; a positive number is needed.", what,
                field ? "value" : "key", static_cast<double>(pool.scale[field]));
        }
        for (int32_t layer = 0; layer < pool.numLayers; ++layer)
        {
            void const* base = pool.layers[field][layer];
            if (!base || !isAligned(base, sizeOf(pool.dtype)))
            {
                return refuse("The %s pool's layer %d has its %ss at %p; an address aligned to %d bytes is needed.",
                    what, layer, field ? "value" : "key", base, sizeOf(pool.dtype));
            }
        }
    }
    return okStatus();
}

Status checkSpan(MapParams const& params)
{
    Span const& span = params.span;
    if (span.numTokens < 0 || params.chunkTokens < 0 || params.chunkTokens > kMaxChunkTokens)
    {
        return refuse("The span has %lld tokens in chunks of %d; neither may be negative, nor a chunk above %d.",
            static_cast<long long>(span.numTokens), params.chunkTokens, kMaxChunkTokens);
    }
    if (span.indexType != IndexType::kINT32 && span.indexType != IndexType::kINT64)
    {
        return refuse("The span's index type is %d; use int32 or int64.", static_cast<int32_t>(span.indexType));
    }
    if (span.numTokens == 0)
    {
        return okStatus();
    }
    if (!span.sourceSlots || !span.targetSlots || !span.positions)
    {
        return refuse("The span lacks %s; give one per token.",
            !span.sourceSlots       ? "source slots"
                : !span.targetSlots ? "target slots"
                                    : "positions");
    }
    if (params.map.readsTokenIds && !span.tokenIds)
    {
        return refuse("This map reads the target's own layer 0: give token ids, one per token.");
    }
    return okStatus();
}

Status checkRope(char const* what, RopeTable const& rope, ModelShape const& shape)
{
    bool const given = rope.cos && rope.sin && rope.numPositions > 0 && rope.numPositions <= INT32_MAX;
    if (shape.rotaryDim > 0 && !(given && std::isfinite(rope.scale) && rope.scale != 0.0f))
    {
        return refuse("The %s's RoPE table has %lld positions at %p and %p and scale %g; cos and sin of at least one "
                      "position and a scale other than 0 are needed.",
            what, static_cast<long long>(rope.numPositions), static_cast<void const*>(rope.cos),
            static_cast<void const*>(rope.sin), static_cast<double>(rope.scale));
    }
    return okStatus();
}

Status checkTokenTable(MapParams const& params)
{
    TokenTable const& tokens = params.tokenTable;
    bool const given = tokens.fields[0] && tokens.fields[1] && tokens.vocabSize > 0 && isKnown(tokens.dtype);
    if (params.map.readsTokenIds && !given)
    {
        return refuse("This map reads the target's own layer 0: give a token table of keys and values; got %p and %p "
                      "for %lld tokens.",
            tokens.fields[0], tokens.fields[1], static_cast<long long>(tokens.vocabSize));
    }
    return okStatus();
}

Status checkWorkspace(MapParams const& params)
{
    size_t const needed = workspaceSize(params.map, params.span.numTokens, params.chunkTokens, params.variant);
    if (params.workspaceBytes < needed || (needed && !params.workspace))
    {
        return refuse("The workspace has %zu bytes at %p; this call needs %zu (workspaceSize).", params.workspaceBytes,
            params.workspace, needed);
    }
    if (!isAligned(params.workspace, kWorkspaceAlignment))
    {
        return refuse("The workspace begins at %p; align it to %d bytes.", params.workspace,
            static_cast<int32_t>(kWorkspaceAlignment));
    }
    return okStatus();
}

} // namespace

Status checkCall(MapParams const& params)
{
    Status status = checkMap(params.map);
    status = isOk(status) ? checkPool("source", params.source, params.map.source) : status;
    status = isOk(status) ? checkPool("target", params.target, params.map.target) : status;
    status = isOk(status) ? checkSpan(params) : status;
    if (!isOk(status) || params.span.numTokens == 0)
    {
        return status; // an empty span reads no table
    }
    status = checkRope("source", params.sourceRope, params.map.source);
    status = isOk(status) ? checkRope("target", params.targetRope, params.map.target) : status;
    return isOk(status) ? checkTokenTable(params) : status;
}

size_t workspaceSize(PackedMap const& map, int64_t numTokens, int32_t chunkTokens, Variant variant)
{
    return numTokens > 0 ? static_cast<size_t>(layOutWorkspace(map, numTokens, chunkTokens, variant).bytes) : 0;
}

Status validate(MapParams const& params)
{
    if (params.variant < Variant::kAUTO || params.variant > Variant::kHOPPER)
    {
        return refuse("Variant %d is not known; use 0 to %d.", static_cast<int32_t>(params.variant),
            static_cast<int32_t>(Variant::kHOPPER));
    }
    if (params.variant == Variant::kHOPPER && params.map.weightType == DType::kFP8_E4M3)
    {
        return refuse("The Hopper kernel reads weights in bfloat16 and this map keeps them in fp8-e4m3; use another "
                      "variant, or pack the map with bfloat16 weights.");
    }
    Status const status = checkCall(params);
    return isOk(status) ? checkWorkspace(params) : status;
}

} // namespace trtllm_kvmap
