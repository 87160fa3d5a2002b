// From block offsets to slots, on the device: the first kernel of an enqueue.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace trtllm_kvmap::plugin
{

// One side of one sequence. slot = block * tokensPerBlock + offset, or -1 where there is no block.
struct SlotSource
{
    int32_t const* blockOffsets; // device: the key entries of the sequence; null for a dense cache
    int32_t entriesPerBlock; // 2 * numLayers
    int32_t tokensPerBlock;
    int32_t firstSlot; // dense: the slot of the first token, the others follow
};

// The tokens of one sequence; the outputs are device memory [numTokens].
struct SequenceSlots
{
    SlotSource source;
    SlotSource target;
    int32_t firstPosition;
    int32_t numTokens;
    int32_t* sourceSlots;
    int32_t* targetSlots;
    int32_t* positions;
    int32_t* mappedLength; // device, one number; null when nobody asks
    int32_t numMapped; // what is written there
};

// Enqueues the kernel; returns null, or what went wrong. With no tokens only the mapped length is written.
char const* resolveSlots(SequenceSlots const& sequence, CUstream_st* stream);

} // namespace trtllm_kvmap::plugin
