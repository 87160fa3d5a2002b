// The product: for every column tile of every group of the map, y = sum_i x_i W_i, then bias, the target's RoPE, one
// rounding and a scatter into the target's blocks (finishTile.cuh).
//
// A block of 8 warps walks over work items (a tile of tokens x a tile of columns, or a part of its K) until none is
// left. Inputs come in K-blocks of 64: rows of x from the workspace, chosen chunk by chunk through the group's slice
// list, and whole blocks of W as they were packed. A ring of kStages such pairs in shared memory is filled by cp.async
// ahead of the products. Shared rows are 128 bytes; 16-byte chunk c of row r lies at c ^ (r & 7), so that the eight
// rows an ldmatrix reads at one chunk fall into different banks.
#pragma once

#include "kernels/finishTile.cuh"
#include "kernels/float8Weights.cuh"

namespace trtllm_kvmap::kernels
{

//! kRows tokens x kColumns columns, eight warps as kWarpRows x (8 / kWarpRows), kResident blocks on a multiprocessor.
//! kSplitsK: an item may be a part of K. kWeightBytes: 2, weights as they are multiplied, or 1, fp8-e4m3.
template <int kRowsOfTile, int kColumnsOfTile, int kWarpRows, int kRing, int kResidentBlocks, bool kSplits,
    int kBytesOfWeight>
struct GemmShape
{
    static constexpr int kResident = kResidentBlocks;
    static constexpr bool kSplitsK = kSplits;
    static constexpr int kRows = kRowsOfTile;
    static constexpr int kColumns = kColumnsOfTile;
    static constexpr int kStages = kRing;
    static constexpr int kWarpColumns = kGemmThreads / 32 / kWarpRows;
    static constexpr int kRowsOfWarp = kRows / kWarpRows;
    static constexpr int kColumnsOfWarp = kColumns / kWarpColumns;
    static constexpr int kMmaRows = kRowsOfWarp / 16;
    static constexpr int kMmaColumns = kColumnsOfWarp / 8;
    static constexpr int kRowBytes = kBlockInputs * 2;
    static constexpr int kWeightBytes = kBytesOfWeight;
    static constexpr bool kScaled = kWeightBytes == 1;
    static constexpr int kStageBytes = kRows * kRowBytes + kColumns * kBlockInputs * kWeightBytes;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kStagingBytes = stagingBytes(kRows, kColumns);
    static constexpr int kSharedBytes = kRingBytes > kStagingBytes ? kRingBytes : kStagingBytes;
};

// A wide tile does 85 FLOP for each byte it takes from the L2 cache, which is what limits tiles of 128 x 128 (64); its
// accumulators leave room for one block. The others hide their beginnings and endings behind a second block.
template <int kWeightBytes>
using WideShape = GemmShape<kWideTileRows, kWideColumns, 4, 3, 1, false, kWeightBytes>;
template <int kWeightBytes>
using NarrowShape = GemmShape<kNarrowTileRows, kBlockColumns, 4, 4, 2, false, kWeightBytes>;
template <int kWeightBytes>
using SmallTShape = GemmShape<kSmallTileRows, kWideColumns, 2, 4, 2, true, kWeightBytes>;

//! One work item, decoded.
struct WorkItem
{
    MapGroup group;
    int32_t column; // first, of the group
    int32_t firstRow;
    int32_t firstBlock; // of K
    int32_t endBlock;
};

//! Part \p split of K of the column tile \p tile, for the rows from \p firstRow on.
__device__ __forceinline__ WorkItem itemOf(GemmArgs const& args, int32_t tileIndex, int32_t firstRow, int32_t split)
{
    WorkItem item;
    Tile const tile = args.tiles[tileIndex];
    item.group = args.groups[tile.group];
    item.column = tile.column;
    item.firstRow = firstRow;
    item.firstBlock = item.group.kBlocks * split / args.numSplits;
    item.endBlock = item.group.kBlocks * (split + 1) / args.numSplits;
    return item;
}

//! Row tiles vary fastest: blocks that run at the same time share the tile of W, and the workspace rows of a group's
//! other column tiles follow while they are still in the L2 cache.
__device__ __forceinline__ WorkItem workItem(GemmArgs const& args, int32_t index, int32_t tileRows)
{
    int32_t const rest = index / args.numRowTiles;
    return itemOf(args, rest % args.numTiles, index % args.numRowTiles * tileRows, rest / args.numTiles);
}

//! Inputs 8 chunk .. 8 chunk + 7 of one token row of the workspace, and how far apart rows lie there.
template <typename T>
struct InputChunk
{
    T const* first; // null beyond the last input
    int32_t pitch;
};

template <typename T>
__device__ __forceinline__ InputChunk<T> inputChunk(
    GemmArgs const& args, MapGroup const& group, int32_t chunk, int32_t row)
{
    int32_t const sourceChunks = group.numSourceSlices * (args.sourceWidth / kVector);
    bool const own = chunk >= sourceChunks;
    int32_t const width = own ? args.ownWidth : args.sourceWidth;
    int32_t const within = own ? chunk - sourceChunks : chunk;
    int32_t const ordinal = within / (width / kVector);
    if (own && ordinal >= group.numOwnSlices)
    {
        return {nullptr, width};
    }
    int32_t const place = args.sliceLists[group.sliceList + (own ? group.numSourceSlices : 0) + ordinal];
    int64_t const slice = own ? place - args.numSourceSlices : place;
    T const* const base = static_cast<T const*>(own ? args.own : args.source);
    int32_t const inSlice = (within - ordinal * (width / kVector)) * kVector;
    return {base + (slice * args.chunkTokens + row) * width + inSlice, width};
}

//! Start the copies of K-block \p block into ring stage \p stage.
template <typename T, typename Shape>
__device__ __forceinline__ void loadStage(GemmArgs const& args, WorkItem const& item, int32_t block, uint32_t stage)
{
    constexpr int kChunks = kBlockInputs / kVector; // of 16 bytes in a row of x
    constexpr int kRowsAtOnce = kGemmThreads / kChunks;
    constexpr int kPieces = kBlockElements * Shape::kWeightBytes / 16; // of 16 bytes in a packed block
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const chunk = thread % kChunks;
    int32_t const row = thread / kChunks;
    InputChunk<T> const x = inputChunk<T>(args, item.group, block * kChunks + chunk, item.firstRow + row);
    uint32_t const place = stage + row * Shape::kRowBytes + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < Shape::kRows / kRowsAtOnce; ++i)
    {
        // kRowsAtOnce is a multiple of 8, so the swizzle of the rows below is the same.
        T const* const from = x.first ? x.first + static_cast<int64_t>(i) * kRowsAtOnce * x.pitch
                                      : static_cast<T const*>(args.source); // not read
        cpAsync16(place + i * kRowsAtOnce * Shape::kRowBytes, from, x.first != nullptr);
    }
    uint32_t const weightStage = stage + Shape::kRows * Shape::kRowBytes;
    int32_t const columns = item.group.numHeads * args.headDim;
#pragma unroll
    for (int i = 0; i < Shape::kColumns / kBlockColumns * kPieces / kGemmThreads; ++i)
    {
        int32_t const piece = i * kGemmThreads + thread;
        int32_t const columnBlock = item.column / kBlockColumns + piece / kPieces;
        bool const exists = columnBlock * kBlockColumns < columns;
        int64_t const packed = item.group.weight
            + (static_cast<int64_t>(exists ? columnBlock : 0) * item.group.kBlocks + block) * kBlockElements;
        cpAsync16(weightStage + piece * 16,
            static_cast<char const*>(args.weights) + packed * Shape::kWeightBytes + piece % kPieces * 16, exists);
    }
}

template <typename Shape>
using Accumulators = float[Shape::kMmaRows][Shape::kMmaColumns][4];

//! accumulators += x W over step \p k of 16 inputs, W in fp8-e4m3: each lane names one of 32 rows at that chunk.
template <typename T, typename Shape>
__device__ __forceinline__ void multiplyFloat8Step(
    uint32_t const (&x)[Shape::kMmaRows][4], uint32_t weightStage, int k, Accumulators<Shape>& accumulators)
{
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / 32;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const row = warp % Shape::kWarpColumns * Shape::kColumnsOfWarp + lane;
#pragma unroll
    for (int j = 0; j < Shape::kMmaColumns; j += 4)
    {
        uint32_t codes[4];
        ldmatrixX4(codes, weightStage + (row + 8 * j) * kBlockInputs + ((k ^ (row / 2 & 3)) << 4));
#pragma unroll
        for (int n = 0; n < 4; ++n)
        {
            uint32_t const b0 = widenFloat8<T>(codes[n]);
            uint32_t const b1 = widenFloat8<T>(codes[n] << 8);
#pragma unroll
            for (int i = 0; i < Shape::kMmaRows; ++i)
            {
                mmaM16N8K16<T>(accumulators[i][j + n], x[i], b0, b1);
            }
        }
    }
}

//! accumulators += x W over one K-block in shared memory.
template <typename T, typename Shape>
__device__ __forceinline__ void multiplyStage(uint32_t stage, Accumulators<Shape>& accumulators)
{
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / 32;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const warpRow = warp / Shape::kWarpColumns * Shape::kRowsOfWarp;
    int32_t const warpColumn = warp % Shape::kWarpColumns * Shape::kColumnsOfWarp;
    // x: lanes 0-15 name the 16 rows at the lower chunk, lanes 16-31 at the upper. W, whose rows are columns of the
    // matrix: lanes 0-7 and 8-15 the two chunks of 8 rows, lanes 16-31 those of the next 8.
    int32_t const xRow = warpRow + lane % 16;
    int32_t const xChunk = lane / 16;
    int32_t const wRow = warpColumn + lane / 16 * 8 + lane % 8;
    int32_t const wChunk = lane / 8 % 2;
    uint32_t const weightStage = stage + Shape::kRows * Shape::kRowBytes;
#pragma unroll
    for (int k = 0; k < kBlockInputs / 16; ++k)
    {
        uint32_t x[Shape::kMmaRows][4];
#pragma unroll
        for (int i = 0; i < Shape::kMmaRows; ++i)
        {
            ldmatrixX4(x[i], stage + (xRow + 16 * i) * Shape::kRowBytes + (((2 * k + xChunk) ^ (xRow & 7)) << 4));
        }
        if constexpr (Shape::kWeightBytes == 1)
        {
            multiplyFloat8Step<T, Shape>(x, weightStage, k, accumulators);
        }
        else
        {
#pragma unroll
            for (int j = 0; j < Shape::kMmaColumns; j += 2)
            {
                uint32_t w[4];
                ldmatrixX4(
                    w, weightStage + (wRow + 8 * j) * Shape::kRowBytes + (((2 * k + wChunk) ^ (wRow & 7)) << 4));
#pragma unroll
                for (int i = 0; i < Shape::kMmaRows; ++i)
                {
                    mmaM16N8K16<T>(accumulators[i][j], x[i], w[0], w[1]);
                    mmaM16N8K16<T>(accumulators[i][j + 1], x[i], w[2], w[3]);
                }
            }
        }
    }
}

//! All K-blocks of an item. On return no copy is in flight and every warp is done with the ring.
template <typename T, typename Shape>
__device__ __forceinline__ void multiplyItem(
    GemmArgs const& args, WorkItem const& item, uint32_t ring, Accumulators<Shape>& accumulators)
{
#pragma unroll
    for (int i = 0; i < Shape::kMmaRows; ++i)
    {
#pragma unroll
        for (int j = 0; j < Shape::kMmaColumns; ++j)
        {
#pragma unroll
            for (int e = 0; e < 4; ++e)
            {
                accumulators[i][j][e] = 0.0f;
            }
        }
    }
    int32_t next = item.firstBlock; // to be loaded
    uint32_t fill = ring;
    uint32_t const end = ring + Shape::kRingBytes;
    // One group is committed per step even when nothing is left to load, so that the count of a wait is a constant.
#pragma unroll
    for (int i = 0; i < Shape::kStages - 1; ++i, ++next, fill += Shape::kStageBytes)
    {
        if (next < item.endBlock)
        {
            loadStage<T, Shape>(args, item, next, fill);
        }
        cpAsyncCommit();
    }
    uint32_t use = ring;
    for (int32_t block = item.firstBlock; block < item.endBlock; ++block, ++next)
    {
        cpAsyncWait<Shape::kStages - 2>();
        // Everyone's copies of this stage have arrived, and everyone has left the stage that is filled next.
        __syncthreads();
        if (next < item.endBlock)
        {
            loadStage<T, Shape>(args, item, next, fill);
        }
        cpAsyncCommit();
        fill = fill + Shape::kStageBytes == end ? ring : fill + Shape::kStageBytes;
        multiplyStage<T, Shape>(use, accumulators);
        use = use + Shape::kStageBytes == end ? ring : use + Shape::kStageBytes;
    }
    cpAsyncWait<0>();
    __syncthreads();
}

//! Bias and rotate a warp's fragments into staging, then write the tile.
template <typename Shape>
__device__ __forceinline__ void finishItem(GemmArgs const& args, MapGroup const& group, int32_t column,
    int32_t firstRow, float* staging, Accumulators<Shape> const& accumulators)
{
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / 32;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const warpRow = warp / Shape::kWarpColumns * Shape::kRowsOfWarp;
    int32_t const warpColumn = warp % Shape::kWarpColumns * Shape::kColumnsOfWarp;
#pragma unroll
    for (int j = 0; j < Shape::kMmaColumns; ++j)
    {
        int32_t const inTile = warpColumn + 8 * j + 2 * (lane % 4);
        ColumnPair const pair = columnPair<Shape::kScaled>(args, group, column, inTile);
#pragma unroll
        for (int i = 0; i < Shape::kMmaRows; ++i)
        {
#pragma unroll
            for (int h = 0; h < 2; ++h)
            {
                int32_t const row = warpRow + 16 * i + 8 * h + lane / 4;
                stagePair<Shape::kColumns, Shape::kScaled>(args, pair, firstRow, row, accumulators[i][j][2 * h],
                    accumulators[i][j][2 * h + 1], staging);
            }
        }
    }
    __syncthreads();
    scatterTile<Shape::kRows, Shape::kColumns>(args, group, column, firstRow, staging);
    __syncthreads(); // staging and ring are the same memory
}

//! Sums of a part of K, in the order of the threads, [split][column tile][row tile][register][thread].
template <typename Shape>
__device__ __forceinline__ float* partialTile(GemmArgs const& args, int32_t index)
{
    return args.partials + static_cast<int64_t>(index) * Shape::kRows * Shape::kColumns + threadIdx.x;
}

template <typename Shape>
__device__ __forceinline__ void storePartial(
    GemmArgs const& args, int32_t index, Accumulators<Shape> const& accumulators)
{
    float* partial = partialTile<Shape>(args, index);
#pragma unroll
    for (int i = 0; i < Shape::kMmaRows; ++i)
    {
#pragma unroll
        for (int j = 0; j < Shape::kMmaColumns; ++j)
        {
#pragma unroll
            for (int e = 0; e < 4; ++e, partial += kGemmThreads)
            {
                *partial = accumulators[i][j][e];
            }
        }
    }
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(kGemmThreads, Shape::kResident) groupedGemm(__grid_constant__ GemmArgs const args)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    int32_t const numItems = args.numRowTiles * args.numTiles * args.numSplits;
    for (int32_t index = static_cast<int32_t>(blockIdx.x); index < numItems; index += static_cast<int32_t>(gridDim.x))
    {
        WorkItem const item = workItem(args, index, Shape::kRows);
        Accumulators<Shape> accumulators;
        multiplyItem<T, Shape>(args, item, sharedAddress(shared), accumulators);
        if (!Shape::kSplitsK || args.numSplits == 1)
        {
            finishItem<Shape>(
                args, item.group, item.column, item.firstRow, reinterpret_cast<float*>(shared), accumulators);
        }
        else
        {
            storePartial<Shape>(args, index, accumulators);
        }
    }
}

//! Add the parts of K in their order, always the same, and finish the tile. One block per tile.
template <typename Shape>
__global__ void __launch_bounds__(kGemmThreads) finishSplits(__grid_constant__ GemmArgs const args)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    WorkItem const item = workItem(args, static_cast<int32_t>(blockIdx.x), Shape::kRows);
    int32_t const numTiles = args.numRowTiles * args.numTiles;
    Accumulators<Shape> accumulators;
    for (int32_t split = 0; split < args.numSplits; ++split)
    {
        float const* partial = partialTile<Shape>(args, split * numTiles + static_cast<int32_t>(blockIdx.x));
#pragma unroll
        for (int i = 0; i < Shape::kMmaRows; ++i)
        {
#pragma unroll
            for (int j = 0; j < Shape::kMmaColumns; ++j)
            {
#pragma unroll
                for (int e = 0; e < 4; ++e, partial += kGemmThreads)
                {
                    accumulators[i][j][e] = split == 0 ? *partial : __fadd_rn(accumulators[i][j][e], *partial);
                }
            }
        }
    }
    finishItem<Shape>(args, item.group, item.column, item.firstRow, reinterpret_cast<float*>(shared), accumulators);
}

} // namespace trtllm_kvmap::kernels
