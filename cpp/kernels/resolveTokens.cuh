// Once per chunk: where each token lies, with every index checked, so that no later kernel divides or trusts.
#pragma once

#include "kernels/cacheElements.cuh"

namespace trtllm_kvmap::kernels
{

constexpr int32_t kResolveThreads = 256;

struct ResolveArgs
{
    Span span;
    int64_t firstToken;
    int32_t numTokens; // of the span in this chunk
    int32_t numRows;   // whole tiles
    int32_t sourceTokensPerBlock;
    int32_t targetTokensPerBlock;
    int64_t sourceSlots;
    int64_t targetSlots;
    int64_t numPositions; // that both tables have
    int64_t vocabSize;    // 0: token ids are not read
    TokenRow* rows;
};

__device__ __forceinline__ int64_t loadIndex(void const* array, int64_t i, IndexType type)
{
    return type == IndexType::kINT32 ? static_cast<int32_t const*>(array)[i] : static_cast<int64_t const*>(array)[i];
}

__global__ void __launch_bounds__(kResolveThreads) resolveTokens(__grid_constant__ ResolveArgs const args)
{
    int32_t const index = static_cast<int32_t>(blockIdx.x * kResolveThreads + threadIdx.x);
    if (index >= args.numRows)
    {
        return;
    }
    TokenRow row{-1, 0, 0, 0, 0, 0};
    if (index < args.numTokens)
    {
        int64_t const token = args.firstToken + index;
        IndexType const type = args.span.indexType;
        int64_t const source = loadIndex(args.span.sourceSlots, token, type);
        int64_t const target = loadIndex(args.span.targetSlots, token, type);
        int64_t const position = loadIndex(args.span.positions, token, type);
        int64_t const id = args.vocabSize > 0 ? loadIndex(args.span.tokenIds, token, type) : 0;
        bool const kept = source >= 0 && source < args.sourceSlots && target >= 0 && target < args.targetSlots
            && position >= 0 && position < args.numPositions && id >= 0 && (args.vocabSize == 0 || id < args.vocabSize);
        if (kept)
        {
            row.sourceBlock = static_cast<int32_t>(source / args.sourceTokensPerBlock);
            row.sourceOffset = static_cast<int32_t>(source % args.sourceTokensPerBlock);
            row.targetBlock = static_cast<int32_t>(target / args.targetTokensPerBlock);
            row.targetOffset = static_cast<int32_t>(target % args.targetTokensPerBlock);
            row.position = static_cast<int32_t>(position);
            row.tokenId = static_cast<int32_t>(id);
        }
    }
    args.rows[index] = row;
}

} // namespace trtllm_kvmap::kernels
