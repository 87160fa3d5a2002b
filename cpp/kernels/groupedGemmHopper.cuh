// The product on sm_90a: wgmma out of shared memory that TMA fills. Same work items, same packed map, same ending as
// groupedGemm.cuh; bf16 only, and slices whose width is a multiple of 64, so that a K-block lies in one slice.
//
// Eight warps (two warpgroups) multiply, each warpgroup 128 of the 256 rows; one thread of a ninth warp fills the ring.
// A stage has two mbarriers: `full`, which the copies complete, and `empty`, at which both warpgroups arrive when the
// products that read the stage are done. The ring is also the staging tile, so before an item the copying thread waits
// for `drained`, at which both warpgroups arrive when the last item is written.
#pragma once

#include "kernels/groupedGemm.cuh"
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
    static constexpr int kThreads = kGemmThreads + 32;
    static constexpr int kInputBytes = kRows * kBlockInputs * 2;
    static constexpr int kWeightBlockBytes = kBlockElements * 2;
    static constexpr int kStageBytes = kInputBytes + kColumns / kBlockColumns * kWeightBlockBytes;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kBarrierBytes = 8;
    static constexpr int kSharedBytes = kRingBytes + (2 * kStages + 1) * kBarrierBytes;
    static_assert(stagingBytes(kRows, kColumns) <= kRingBytes, "staging reuses the ring");
};

//! The tensor maps are looked at by the copy engine, in the kernel's parameters.
struct HopperArgs
{
    CUtensorMap source;  // [slices * chunkTokens][sourceWidth], boxes of 256 x 64, 128-byte swizzle
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
        return first + HopperShape::kRingBytes + s * HopperShape::kBarrierBytes;
    }

    __device__ __forceinline__ uint32_t empty(int32_t s) const
    {
        return full(HopperShape::kStages + s);
    }

    __device__ __forceinline__ uint32_t drained() const
    {
        return full(2 * HopperShape::kStages);
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

//! A barrier of the warps that multiply.
__device__ __forceinline__ void syncMultipliers()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::syncBarrier(1, kGemmThreads);
#else
    asm volatile("bar.sync 1, %0;\n" ::"n"(kGemmThreads) : "memory");
#endif
}

//! Copies of one K-block of an item into a stage.
__device__ __forceinline__ void copyStage(
    HopperArgs const& args, WorkItem const& item, int32_t block, uint32_t stage, uint32_t full)
{
    GemmArgs const& gemm = args.gemm;
    MapGroup const& group = item.group;
    int32_t const input = block * kBlockInputs;
    int32_t const sourceInputs = group.numSourceSlices * gemm.sourceWidth;
    bool const own = input >= sourceInputs;
    int32_t const width = own ? gemm.ownWidth : gemm.sourceWidth;
    int32_t const within = own ? input - sourceInputs : input;
    int32_t const ordinal = within / width;
    int32_t const place = gemm.sliceLists[group.sliceList + (own ? group.numSourceSlices : 0) + ordinal];
    int32_t const slice = own ? place - gemm.numSourceSlices : place;

    int32_t const columnBlock = item.column / kBlockColumns;
    bool const both = item.column + kBlockColumns < group.numHeads * gemm.headDim;
    int32_t const packed = static_cast<int32_t>(group.weight / kBlockElements);
    uint32_t const weights = stage + HopperShape::kInputBytes;
    mbarrierArriveExpectBytes(full, HopperShape::kInputBytes + (both ? 2 : 1) * HopperShape::kWeightBlockBytes);
    tmaLoad2D(stage, own ? &args.own : &args.source, within - ordinal * width,
        slice * gemm.chunkTokens + item.firstRow, full);
    tmaLoad2D(weights, &args.weights, 0, (packed + columnBlock * group.kBlocks + block) * kBlockColumns, full);
    if (both)
    {
        tmaLoad2D(weights + HopperShape::kWeightBlockBytes, &args.weights, 0,
            (packed + (columnBlock + 1) * group.kBlocks + block) * kBlockColumns, full);
    }
}

//! The one thread that copies.
__device__ __forceinline__ void fillRing(HopperArgs const& args, HopperRing ring, int32_t numItems)
{
    RingPlace place{0, 0};
    uint32_t items = 0;
    for (int32_t index = static_cast<int32_t>(blockIdx.x); index < numItems;
         index += static_cast<int32_t>(gridDim.x), ++items)
    {
        WorkItem const item = workItem(args.gemm, index, HopperShape::kRows);
        mbarrierWait(ring.drained(), (items & 1) ^ 1); // the first wait is for the phase before the first: at once
        for (int32_t block = item.firstBlock; block < item.endBlock; ++block, place.advance())
        {
            mbarrierWait(ring.empty(place.stage), place.parity ^ 1);
            copyStage(args, item, block, ring.stage(place.stage), ring.full(place.stage));
        }
    }
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

__device__ __forceinline__ void finishHopperItem(
    GemmArgs const& args, WorkItem const& item, float* staging, HopperAccumulators const& accumulators)
{
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / 32;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const warpRow = warp / 4 * (HopperShape::kRows / HopperShape::kWarpgroups) + warp % 4 * 16;
#pragma unroll
    for (int j = 0; j < HopperShape::kColumns / 8; ++j)
    {
        ColumnPair const pair = columnPair<false>(args, item.group, item.column, 8 * j + 2 * (lane % 4));
#pragma unroll
        for (int p = 0; p < HopperShape::kProducts; ++p)
        {
#pragma unroll
            for (int h = 0; h < 2; ++h)
            {
                int32_t const row = warpRow + 64 * p + 8 * h + lane / 4;
                stagePair<HopperShape::kColumns, false>(args, pair, item.firstRow, row, accumulators[p][4 * j + 2 * h],
                    accumulators[p][4 * j + 2 * h + 1], staging);
            }
        }
    }
    syncMultipliers();
    scatterTile<HopperShape::kRows, HopperShape::kColumns>(args, item.group, item.column, item.firstRow, staging);
}

__global__ void __launch_bounds__(HopperShape::kThreads, 1) groupedGemmHopper(__grid_constant__ HopperArgs const args)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    HopperRing const ring{sharedAddress(shared)};
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    if (thread == 0)
    {
        for (int32_t s = 0; s < HopperShape::kStages; ++s)
        {
            mbarrierInit(ring.full(s), 1);
            mbarrierInit(ring.empty(s), HopperShape::kWarpgroups);
        }
        mbarrierInit(ring.drained(), HopperShape::kWarpgroups);
        fenceMbarrierInit();
    }
    __syncthreads();

    int32_t const numItems = args.gemm.numRowTiles * args.gemm.numTiles;
    if (thread >= kGemmThreads)
    {
        if (thread == kGemmThreads)
        {
            fillRing(args, ring, numItems);
        }
        return;
    }
    int32_t const warpgroup = thread / 128;
    bool const speaks = thread % 128 == 0; // for its warpgroup
    RingPlace place{0, 0};
    for (int32_t index = static_cast<int32_t>(blockIdx.x); index < numItems; index += static_cast<int32_t>(gridDim.x))
    {
        WorkItem const item = workItem(args.gemm, index, HopperShape::kRows);
        HopperAccumulators accumulators;
        int32_t last = 0;
        for (int32_t block = item.firstBlock; block < item.endBlock; ++block, place.advance())
        {
            mbarrierWait(ring.full(place.stage), place.parity);
            multiplyHopperStage(ring.stage(place.stage), warpgroup, accumulators, block > item.firstBlock);
            wgmmaWait<1>(); // the block before this one has been read
            if (speaks && block > item.firstBlock)
            {
                mbarrierArrive(ring.empty(last));
            }
            last = place.stage;
        }
        wgmmaWait<0>();
        if (speaks)
        {
            mbarrierArrive(ring.empty(last));
        }
        syncMultipliers(); // the other warpgroup has read the ring too
        finishHopperItem(args.gemm, item, reinterpret_cast<float*>(shared), accumulators);
        fenceProxyAsync(); // the copy engine overwrites what was staged
        syncMultipliers();
        if (speaks)
        {
            mbarrierArrive(ring.drained());
        }
    }
#endif
}

} // namespace trtllm_kvmap::kernels
