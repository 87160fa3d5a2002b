#include "resolveSlots.h"

#include "kernels/launchKernel.cuh"

namespace trtllm_kvmap::plugin
{

namespace
{

constexpr int32_t kTHREADS = 256;

__device__ int32_t slotOf(SlotSource const& side, int32_t token, int32_t position)
{
    if (side.blockOffsets == nullptr)
    {
        return side.firstSlot + token;
    }
    int32_t const entry = side.blockOffsets[position / side.tokensPerBlock];
    int32_t const offset = position % side.tokensPerBlock;
    // Negative: no block, or one in the host's pool, which the caller has refused.
    return entry < 0 ? -1 : entry / side.entriesPerBlock * side.tokensPerBlock + offset;
}

__global__ void resolveSlotsKernel(SequenceSlots sequence)
{
    int32_t const token = static_cast<int32_t>(blockIdx.x) * kTHREADS + static_cast<int32_t>(threadIdx.x);
    if (token == 0 && sequence.mappedLength != nullptr)
    {
        *sequence.mappedLength = sequence.numMapped;
    }
    if (token < sequence.numTokens)
    {
        int32_t const position = sequence.firstPosition + token;
        sequence.sourceSlots[token] = slotOf(sequence.source, token, position);
        sequence.targetSlots[token] = slotOf(sequence.target, token, position);
        sequence.positions[token] = position;
    }
}

} // namespace

char const* resolveSlots(SequenceSlots const& sequence, CUstream_st* stream)
{
    unsigned const blocks = sequence.numTokens > 0 ? (sequence.numTokens + kTHREADS - 1) / kTHREADS : 1;
    return kernels::launchKernel(resolveSlotsKernel, dim3(blocks), dim3(kTHREADS), 0, stream, sequence);
}

} // namespace trtllm_kvmap::plugin
