// The product on sm_90a: wgmma out of shared memory that TMA fills. Same tiles and same packed map as groupedGemm.cuh;
// bf16 only, and slices whose width is a multiple of 64, so that a K-block lies in one slice.
//
// Two blocks are a cluster and work on two tiles with one operand in common (clusterItems.cuh), of which each copies
// half to both (multicast). Of a K-block a multiprocessor then takes 32 or 40 KB from the L2 cache, not 48.
//
// Eight warps (two warpgroups) multiply, each warpgroup 128 of the 256 rows; one thread of a third warpgroup fills the
// ring. A stage has two mbarriers: `full`, which the copies of both blocks complete, and `empty`, at which the
// warpgroups of both blocks arrive when the products that read the stage are done, since either block's copies
// overwrite it in both. A result leaves through shared memory of its own, each warp's by itself and eight rows at a
// time, so that the next item's copies run under an item's ending.
#pragma once

#include "kernels/clusterItems.cuh"
#include "kernels/finishRows.cuh"
#include "kernels/ptxHopper.cuh"

namespace trtllm_kvmap::kernels
{

struct HopperShape
{
    static constexpr int kRows = kWideTileRows;
    static constexpr int kColumns = kWideColumns;
    static constexpr int kStages = 4;
    static constexpr int kWarpgroups = 2;
    static constexpr int kProducts = kRows / kWarpgroups / 64; // m64n128 side by side in a warpgroup
    static constexpr int kThreads = kGemmThreads + 128; // registers are dealt out to whole warpgroups
    static constexpr int kCopyRegisters = 40;
    static constexpr int kMultiplyRegisters = 232;
    static_assert(kGemmThreads * kMultiplyRegisters + 128 * kCopyRegisters <= 65536, "what a block may have");
    static constexpr int kBoxRows = kRows / 2; // of a copy of inputs
    static constexpr int kBoxBytes = kBoxRows * kBlockInputs * 2;
    static constexpr int kInputBytes = 2 * kBoxBytes;
    static constexpr int kWeightBlockBytes = kBlockElements * 2;
    static constexpr int kStageBytes = kInputBytes + kColumns / kBlockColumns * kWeightBlockBytes;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kWarpStagingBytes = stagingBytes(kStagedRows, kColumns);
    static constexpr int kBarriers = kRingBytes + kGemmThreads / 32 * kWarpStagingBytes; // where they begin
    static constexpr int kBarrierBytes = 8;
    static constexpr int kSharedBytes = kBarriers + 2 * kStages * kBarrierBytes;
    static_assert(kSharedBytes <= 227 * 1024, "what a block may have");
};

//! The tensor maps are looked at by the copy engine, in the kernel's parameters.
struct HopperArgs
{
    CUtensorMap source;  // [slices * chunkTokens][sourceWidth], boxes of 128 x 64, 128-byte swizzle
    CUtensorMap own;     // [slices * chunkTokens][ownWidth], the same
    CUtensorMap weights; // [blocks * 64][64], boxes of 64 x 64, as packed: swizzled already
    GemmArgs gemm;
};

//! Where a ring keeps its mbarriers.
struct HopperRing
{
    uint32_t first;

    __device__ __forceinline__ uint32_t stage(int32_t s) const
    {
        return first + s * HopperShape::kStageBytes;
    }

    __device__ __forceinline__ uint32_t full(int32_t s) const
    {
        return first + HopperShape::kBarriers + s * HopperShape::kBarrierBytes;
    }

    __device__ __forceinline__ uint32_t empty(int32_t s) const
    {
        return full(HopperShape::kStages + s);
    }
};

//! A stage, and the parity of the phase of its barriers; both sides step through the ring alike.
struct RingPlace
{
    int32_t stage;
    uint32_t parity;

    __device__ __forceinline__ void advance()
    {
        stage = stage + 1 == HopperShape::kStages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

//! Copies of one K-block into a stage of this block, and of its half of what is shared into that of both.
__device__ __forceinline__ void copyStage(
    HopperArgs const& args, ClusterItem const& item, int32_t rank, int32_t block, uint32_t stage, uint32_t full)
{
    constexpr uint16_t kBOTH = (1 << kClusterBlocks) - 1;
    GemmArgs const& gemm = args.gemm;
    MapGroup const& group = item.work.group;
    int32_t const input = block * kBlockInputs;
    int32_t const sourceInputs = group.numSourceSlices * gemm.sourceWidth;
    bool const own = input >= sourceInputs;
    int32_t const width = own ? gemm.ownWidth : gemm.sourceWidth;
    int32_t const within = own ? input - sourceInputs : input;
    int32_t const ordinal = within / width;
    int32_t const place = gemm.sliceLists[group.sliceList + (own ? group.numSourceSlices : 0) + ordinal];
    int32_t const slice = own ? place - gemm.numSourceSlices : place;
    CUtensorMap const* const inputs = own ? &args.own : &args.source;
    int32_t const column = within - ordinal * width;
    int32_t const row = slice * gemm.chunkTokens + item.work.firstRow;

    int32_t const columnBlock = item.work.column / kBlockColumns;
    int32_t const numBlocks = item.work.column + kBlockColumns < group.numHeads * gemm.headDim ? 2 : 1;
    int32_t const packed = static_cast<int32_t>(group.weight / kBlockElements) + columnBlock * group.kBlocks + block;
    uint32_t const weights = stage + HopperShape::kInputBytes;
    // Bytes of the other block may come before this: they count, and the phase waits for this arrival.
    mbarrierArriveExpectBytes(full, HopperShape::kInputBytes + numBlocks * HopperShape::kWeightBlockBytes);
    if (item.sharesInputs)
    {
        tmaMulticast2D(stage + rank * HopperShape::kBoxBytes, inputs, column, row + rank * HopperShape::kBoxRows, full,
            kBOTH);
        for (int32_t n = 0; n < numBlocks; ++n)
        {
            tmaLoad2D(weights + n * HopperShape::kWeightBlockBytes, &args.weights, 0,
                (packed + n * group.kBlocks) * kBlockColumns, full);
        }
        return;
    }
    tmaLoad2D(stage, inputs, column, row, full);
    tmaLoad2D(stage + HopperShape::kBoxBytes, inputs, column, row + HopperShape::kBoxRows, full);
    if (rank < numBlocks)
    {
        tmaMulticast2D(weights + rank * HopperShape::kWeightBlockBytes, &args.weights, 0,
            (packed + rank * group.kBlocks) * kBlockColumns, full, kBOTH);
    }
}

//! The one thread that copies.
__device__ __forceinline__ void fillRing(HopperArgs const& args, HopperRing ring, int32_t rank)
{
    RingPlace place{0, 0};
    forEachItem(args.gemm, rank,
        [&](ClusterItem const& item)
        {
            for (int32_t block = item.work.firstBlock; block < item.work.endBlock; ++block, place.advance())
            {
                // The first wait is for the phase before the first: at once.
                mbarrierWait(ring.empty(place.stage), place.parity ^ 1);
                copyStage(args, item, rank, block, ring.stage(place.stage), ring.full(place.stage));
            }
        });
}

using HopperAccumulators = float[HopperShape::kProducts][64];

//! One K-block: 4 steps of K, kProducts products each.
__device__ __forceinline__ void multiplyHopperStage(
    uint32_t stage, int32_t warpgroup, HopperAccumulators& accumulators, bool add)
{
    uint32_t const inputs = stage + warpgroup * (HopperShape::kInputBytes / HopperShape::kWarpgroups);
    uint32_t const weights = stage + HopperShape::kInputBytes;
    wgmmaFence();
#pragma unroll
    for (int k = 0; k < kBlockInputs / 16; ++k)
    {
#pragma unroll
        for (int p = 0; p < HopperShape::kProducts; ++p)
        {
            wgmmaBf16(accumulators[p], wgmmaDescriptor(inputs + p * 64 * kBlockInputs * 2 + 32 * k),
                wgmmaDescriptor(weights + 32 * k), add || k > 0);
        }
    }
    wgmmaCommit();
}

//! Tell both blocks that this warpgroup has read a stage: the copies of either overwrite it in both.
__device__ __forceinline__ void releaseStage(HopperRing ring, int32_t stage, int32_t rank)
{
    mbarrierArrive(ring.empty(stage));
    mbarrierArriveCluster(mapShared(ring.empty(stage), rank ^ 1));
}

//! All K-blocks of an item, by the two warpgroups.
__device__ __forceinline__ void multiplyHopperItem(
    WorkItem const& work, HopperRing ring, RingPlace& place, int32_t rank, HopperAccumulators& accumulators)
{
    int32_t const warpgroup = static_cast<int32_t>(threadIdx.x) / 128;
    bool const speaks = threadIdx.x % 128 == 0; // for its warpgroup
    int32_t last = 0;
    for (int32_t block = work.firstBlock; block < work.endBlock; ++block, place.advance())
    {
        mbarrierWait(ring.full(place.stage), place.parity);
        multiplyHopperStage(ring.stage(place.stage), warpgroup, accumulators, block > work.firstBlock);
        wgmmaWait<1>(); // the block before this one has been read
        if (speaks && block > work.firstBlock)
        {
            releaseStage(ring, last, rank);
        }
        last = place.stage;
    }
    wgmmaWait<0>();
    if (speaks)
    {
        releaseStage(ring, last, rank);
    }
}

//! Bias, rotation and rounding, each warp for its own rows: \p staging is the warp's.
__device__ __forceinline__ void finishHopperItem(
    GemmArgs const& args, WorkItem const& work, float* staging, HopperAccumulators const& accumulators)
{
    constexpr int kCOLUMNS = HopperShape::kColumns;
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / 32;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const warpRow = work.firstRow + warp / 4 * (HopperShape::kRows / HopperShape::kWarpgroups) + warp % 4 * 16;
    bool const isHead = tilesAreHeads<kCOLUMNS>(args, work.group);
#pragma unroll
    for (int p = 0; p < HopperShape::kProducts; ++p)
    {
        int32_t const row = warpRow + 64 * p;
        finishRows<0, kCOLUMNS>(args, work.group, work.column, isHead, row, accumulators[p], staging, lane);
        finishRows<1, kCOLUMNS>(args, work.group, work.column, isHead, row + 8, accumulators[p], staging, lane);
    }
}

__global__ void __launch_bounds__(HopperShape::kThreads, 1) groupedGemmHopper(__grid_constant__ HopperArgs const args)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    HopperRing const ring{sharedAddress(shared)};
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const rank = static_cast<int32_t>(clusterRank());
    if (thread == 0)
    {
        for (int32_t s = 0; s < HopperShape::kStages; ++s)
        {
            mbarrierInit(ring.full(s), 1);
            mbarrierInit(ring.empty(s), kClusterBlocks * HopperShape::kWarpgroups);
        }
        fenceMbarrierInit();
    }
    syncCluster(); // the other block's mbarriers are there too

    if (thread >= kGemmThreads)
    {
        giveRegistersBack<HopperShape::kCopyRegisters>();
        if (thread == kGemmThreads)
        {
            fillRing(args, ring, rank);
        }
    }
    else
    {
        takeRegisters<HopperShape::kMultiplyRegisters>();
        RingPlace place{0, 0};
        float* const staging
            = reinterpret_cast<float*>(shared + HopperShape::kRingBytes + thread / 32 * HopperShape::kWarpStagingBytes);
        forEachItem(args.gemm, rank,
            [&](ClusterItem const& item)
            {
                HopperAccumulators accumulators;
                multiplyHopperItem(item.work, ring, place, rank, accumulators);
                if (item.exists)
                {
                    finishHopperItem(args.gemm, item.work, staging, accumulators);
                }
            });
    }
    syncCluster(); // until then the other block arrives here
#endif
}

} // namespace trtllm_kvmap::kernels
