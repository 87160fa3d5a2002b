// A paged KV cache as TensorRT-LLM hands it to its plugins: an address, and where each block lies.
//
//   pool          [numBlocks, numLayers, 2 (key, value), numKvHeads, tokensPerBlock, headDim]
//   pool_mapping  [layer] -> (pool, layer in that pool)
//   block offsets [pool, sequence, 2 (key, value), block in sequence] -> (block * numLayers) * 2 + field
//                 bit 31 set: the block was moved to the host's pool; all bits set: there is none
#pragma once

#include "sequenceSpans.h"

namespace trtllm_kvmap::plugin
{

// Everything here is host memory; `pool` is an address in the device's.
struct PagedCache
{
    char const* side; // "source" or "target", for sentences
    ModelShape shape;
    DType dtype;
    float const* scales; // [key, value]
    int64_t const* poolPointers; // [1, 2]: primary, secondary
    int32_t const* poolMapping; // [numLayers, 2]
    int32_t const* blockOffsets; // [1, numSequences, 2, maxBlocks]
    int32_t numSequences;
    int32_t maxBlocks; // per sequence
    int32_t numBlocks; // in the pool
    int32_t tokensPerBlock;
};

// Refuses null pools, layers that are not in the one pool or twice in it, and blocks of the spans that lie outside it.
// With `written`, also a block that is named twice: two tokens would share a slot.
Status viewPagedCache(PagedCache const& cache, SequenceSpans const& spans, bool written, PoolView* view);

// Tokens of one span that have a block on both sides: those that the map writes.
int32_t countMapped(PagedCache const& source, PagedCache const& target, SequenceSpans const& spans, int32_t sequence);

} // namespace trtllm_kvmap::plugin
