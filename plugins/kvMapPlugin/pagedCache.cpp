#include "pagedCache.h"

#include "cacheDtype.h"
#include "sentence.h"

#include <algorithm>
#include <new>
#include <vector>

namespace trtllm_kvmap::plugin
{

namespace
{

constexpr int32_t kNO_BLOCK = -1;

Status placeLayers(PagedCache const& cache, PoolView* view)
{
    int64_t const blockBytes
        = int64_t{cache.shape.numKvHeads} * cache.tokensPerBlock * cache.shape.headDim * bytesOf(cache.dtype);
    bool taken[kMaxLayers] = {};
    for (int32_t layer = 0; layer < cache.shape.numLayers; ++layer)
    {
        int32_t const pool = cache.poolMapping[2 * layer];
        int32_t const layerInPool = cache.poolMapping[2 * layer + 1];
        if (pool != 0 || layerInPool < 0 || layerInPool >= cache.shape.numLayers || taken[layerInPool])
        {
            return refuse("Layer %d of the %s is mapped to layer %d of pool %d; each of its %d layers needs a place of "
                          "its own in pool 0.",
                layer, cache.side, layerInPool, pool, cache.shape.numLayers);
        }
        taken[layerInPool] = true;
        char* const base = reinterpret_cast<char*>(cache.poolPointers[0]) + layerInPool * 2 * blockBytes;
        view->layers[0][layer] = base;
        view->layers[1][layer] = base + blockBytes;
    }
    return Status{};
}

// Whether the entries of one block of a sequence name a block of the pool; blocks that do are added to `named`.
Status checkBlock(PagedCache const& cache, int32_t sequence, int32_t index, std::vector<int32_t>* named)
{
    int32_t const* const entries = cache.blockOffsets + int64_t{sequence} * 2 * cache.maxBlocks;
    int32_t const key = entries[index];
    int32_t const value = entries[cache.maxBlocks + index];
    int32_t const entriesPerBlock = 2 * cache.shape.numLayers;
    if (key == kNO_BLOCK && value == kNO_BLOCK)
    {
        return Status{}; // its tokens are skipped, and not counted as mapped
    }
    if (key < 0 || value < 0)
    {
        return refuse("Block %d of sequence %d of the %s has offsets %d and %d: it lies in the host's pool. Turn host "
                      "offload of the KV cache off.",
            index, sequence, cache.side, key, value);
    }
    if (key % entriesPerBlock != 0 || value != key + 1 || key / entriesPerBlock >= cache.numBlocks)
    {
        return refuse("Block %d of sequence %d of the %s has offsets %d and %d; (block * %d layers) * 2 and the number "
                      "after it are needed, of a block below %d.",
            index, sequence, cache.side, key, value, cache.shape.numLayers, cache.numBlocks);
    }
    named->push_back(key / entriesPerBlock);
    return Status{};
}

Status checkBlocks(PagedCache const& cache, SequenceSpans const& spans, bool written)
{
    std::vector<int32_t> named;
    for (int32_t sequence = 0; sequence < spans.numSequences; ++sequence)
    {
        if (spans.count(sequence) == 0)
        {
            continue;
        }
        int32_t const last = (spans.first(sequence) + spans.count(sequence) - 1) / cache.tokensPerBlock;
        if (last >= cache.maxBlocks)
        {
            return refuse("Sequence %d needs block %d of the %s; its table has %d blocks of %d tokens.", sequence, last,
                cache.side, cache.maxBlocks, cache.tokensPerBlock);
        }
        for (int32_t index = spans.first(sequence) / cache.tokensPerBlock; index <= last; ++index)
        {
            Status const status = checkBlock(cache, sequence, index, &named);
            if (status.code != StatusCode::kOK)
            {
                return status;
            }
        }
    }
    std::sort(named.begin(), named.end());
    auto const twice = std::adjacent_find(named.begin(), named.end());
    if (written && twice != named.end())
    {
        return refuse("Block %d of the %s is named twice; every token needs a slot of its own.", *twice, cache.side);
    }
    return Status{};
}

bool hasBlock(PagedCache const& cache, int32_t sequence, int32_t position)
{
    return cache.blockOffsets[int64_t{sequence} * 2 * cache.maxBlocks + position / cache.tokensPerBlock] != kNO_BLOCK;
}

int32_t tokensLeftInBlock(PagedCache const& cache, int32_t position)
{
    return cache.tokensPerBlock - position % cache.tokensPerBlock;
}

} // namespace

Status viewPagedCache(PagedCache const& cache, SequenceSpans const& spans, bool written, PoolView* view)
{
    if (cache.poolPointers[0] == 0)
    {
        return refuse("The %s's pool pointer is null; pass the address of its primary KV pool.", cache.side);
    }
    if (cache.numBlocks < 1)
    {
        return refuse("The %s's pool is said to have %d blocks; at least 1 is needed.", cache.side, cache.numBlocks);
    }
    *view = PoolView{};
    view->tokenStride = cache.shape.headDim;
    view->channelStride = 1;
    view->headStride = int64_t{cache.tokensPerBlock} * cache.shape.headDim;
    view->blockStride = 2 * int64_t{cache.shape.numLayers} * cache.shape.numKvHeads * view->headStride;
    view->numBlocks = cache.numBlocks;
    view->numLayers = cache.shape.numLayers;
    view->numKvHeads = cache.shape.numKvHeads;
    view->tokensPerBlock = cache.tokensPerBlock;
    view->headDim = cache.shape.headDim;
    view->dtype = cache.dtype;
    view->scale[0] = cache.scales[0];
    view->scale[1] = cache.scales[1];
    Status status = placeLayers(cache, view);
    if (status.code != StatusCode::kOK)
    {
        return status;
    }
    try
    {
        return checkBlocks(cache, spans, written);
    }
    catch (std::bad_alloc const&)
    {
        return refuse("There is no memory left on the host to check the %s's blocks.", cache.side);
    }
}

int32_t countMapped(PagedCache const& source, PagedCache const& target, SequenceSpans const& spans, int32_t sequence)
{
    int32_t const end = spans.first(sequence) + spans.count(sequence);
    int32_t mapped = 0;
    for (int32_t position = spans.first(sequence); position < end;)
    {
        int32_t const run
            = std::min({tokensLeftInBlock(source, position), tokensLeftInBlock(target, position), end - position});
        bool const both = hasBlock(source, sequence, position) && hasBlock(target, sequence, position);
        mapped += both ? run : 0;
        position += run;
    }
    return mapped;
}

} // namespace trtllm_kvmap::plugin
