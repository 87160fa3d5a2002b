// Which tiles the two blocks of a cluster work on, so that they have one operand in common: two column tiles of a group
// read the same inputs, two row tiles of a column tile the same weights. Every pair of neighbouring column tiles takes
// one way or the other, whatever the groups' numbers of column tiles, so that no table is needed.
#pragma once

#include "kernels/groupedGemm.cuh"

namespace trtllm_kvmap::kernels
{

constexpr int32_t kClusterBlocks = 2;

//! What a block of a cluster works on.
struct ClusterItem
{
    WorkItem work;
    bool sharesInputs; // two column tiles of a group; else two row tiles of one column tile, which share weights
    bool exists;       // else this block has none, or copies and multiplies along without an ending
};

//! Steps of two neighbouring column tiles, an even number; row tiles vary fastest. Tiles of one group are worked on
//! together, row tile by row tile; others one after the other, two row tiles at a time.
__host__ __device__ __forceinline__ int32_t stepsOfTilePair(GemmArgs const& args)
{
    return (args.numRowTiles + 1) / 2 * 2;
}

__host__ __device__ __forceinline__ int32_t numClusterSteps(GemmArgs const& args)
{
    return (args.numTiles + 1) / 2 * stepsOfTilePair(args);
}

//! False when the step \p index has work for neither block. Both blocks of a cluster must agree on that.
__device__ __forceinline__ bool clusterItem(GemmArgs const& args, int32_t index, int32_t rank, ClusterItem& item)
{
    int32_t const steps = stepsOfTilePair(args);
    int32_t const step = index % steps;
    int32_t const left = index / steps * 2;
    int32_t const right = left + 1;
    item.sharesInputs = right < args.numTiles && args.tiles[left].group == args.tiles[right].group;
    int32_t const tile = item.sharesInputs ? left + rank : left + step / (steps / 2);
    int32_t const rowTile = item.sharesInputs ? step : step % (steps / 2) * 2 + rank;
    item.exists = rowTile < args.numRowTiles;
    if (tile >= args.numTiles || (item.sharesInputs && !item.exists))
    {
        return false;
    }
    // The odd block out multiplies rows that are there, and leaves the result.
    item.work = itemOf(args, tile, (item.exists ? rowTile : 0) * kWideTileRows, 0);
    return true;
}

//! The items of this block's cluster, in order.
template <typename Work>
__device__ __forceinline__ void forEachItem(GemmArgs const& args, int32_t rank, Work work)
{
    int32_t const numSteps = numClusterSteps(args);
    int32_t const numClusters = static_cast<int32_t>(gridDim.x) / kClusterBlocks;
    for (int32_t index = static_cast<int32_t>(blockIdx.x) / kClusterBlocks; index < numSteps; index += numClusters)
    {
        ClusterItem item;
        if (clusterItem(args, index, rank, item))
        {
            work(item);
        }
    }
}

} // namespace trtllm_kvmap::kernels
