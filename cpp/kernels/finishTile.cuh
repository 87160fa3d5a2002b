// The end of a product: column scales, bias and the target's RoPE in registers, a float tile in shared memory, and from
// there whole 16-byte pieces into the target's blocks.
//
// Packed columns 2i and 2i + 1 of a key head are a RoPE pair, so both lie in one thread's accumulators. In shared
// memory they go to where their channels are neighbours again: of every 16 columns that turn half-split, the even ones
// first, then the odd ones, each 8 a run of channels.
#pragma once

#include "kernels/cacheElements.cuh"

namespace trtllm_kvmap::kernels
{

constexpr int32_t kGemmThreads = 256;
constexpr int32_t kStagingPadding = 4; // floats after each row: eight rows of a fragment in different banks

constexpr int stagingBytes(int rows, int columns)
{
    return rows * (columns + kStagingPadding) * static_cast<int>(sizeof(float));
}

//! What the kernels of the product read. Pointers of the map are into its packed buffer.
struct GemmArgs
{
    FieldView target[2]; // by Field
    MapGroup const* groups;
    int32_t const* sliceLists;
    int32_t const* headLists;
    Tile const* tiles;
    float const* bias;
    float const* scales; // of columns; read when weights are fp8-e4m3
    void const* weights;
    TokenRow const* rows;
    void const* source; // un-rotated slices, [slice][chunkTokens][sourceWidth]
    void const* own;    // [slice][chunkTokens][ownWidth]
    float* partials;
    RopeTable rope;
    int32_t numSourceSlices;
    int32_t sourceWidth;
    int32_t ownWidth;
    int32_t chunkTokens;
    int32_t numRowTiles;
    int32_t numTiles; // column tiles
    int32_t numSplits;
    int32_t headDim;
    int32_t rotaryDim;
    int32_t interleaved;
    int32_t takesVectors; // 8 channels can be written at once
};

//! Two neighbouring packed columns of a tile.
struct ColumnPair
{
    float bias[2];
    float scale[2];   // with kScaled
    int32_t place[2]; // columns of the staging tile
    int32_t rotation; // index of the RoPE pair, -1: does not turn
};

//! Whether packed columns are brought into channel order in staging.
__device__ __forceinline__ bool untangles(GemmArgs const& args)
{
    return args.takesVectors && !args.interleaved;
}

__device__ __forceinline__ int32_t turningOf(GemmArgs const& args, MapGroup const& group)
{
    return group.field == Field::kKEY ? args.rotaryDim : 0;
}

//! Columns \p inTile (even) and the next one of the tile that begins at column \p column of its group.
template <bool kScaled>
__device__ __forceinline__ ColumnPair columnPair(
    GemmArgs const& args, MapGroup const& group, int32_t column, int32_t inTile)
{
    int32_t const inGroup = column + inTile;
    int32_t const inHead = inGroup % args.headDim;
    bool const exists = inGroup < group.numHeads * args.headDim;
    bool const turns = inHead < turningOf(args, group);
    ColumnPair pair;
    pair.bias[0] = exists ? args.bias[group.bias + inGroup] : 0.0f;
    pair.bias[1] = exists ? args.bias[group.bias + inGroup + 1] : 0.0f;
    pair.scale[0] = kScaled && exists ? args.scales[group.bias + inGroup] : 1.0f;
    pair.scale[1] = kScaled && exists ? args.scales[group.bias + inGroup + 1] : 1.0f;
    pair.rotation = turns ? inHead / 2 : -1;
    bool const moves = turns && untangles(args);
    pair.place[0] = moves ? (inTile & ~15) + (inTile & 15) / 2 : inTile;
    pair.place[1] = pair.place[0] + (moves ? kVector : 1);
    return pair;
}

//! Scale, bias and rotate one token's pair, and leave it in \p staging, [rows][kColumns + padding].
template <int kColumns, bool kScaled>
__device__ __forceinline__ void stagePair(GemmArgs const& args, ColumnPair const& pair, int32_t firstRow, int32_t row,
    float first, float second, float* staging)
{
    float a = kScaled ? __fmaf_rn(first, pair.scale[0], pair.bias[0]) : __fadd_rn(first, pair.bias[0]);
    float b = kScaled ? __fmaf_rn(second, pair.scale[1], pair.bias[1]) : __fadd_rn(second, pair.bias[1]);
    if (pair.rotation >= 0)
    {
        int64_t const angle
            = static_cast<int64_t>(args.rows[firstRow + row].position) * (args.rotaryDim / 2) + pair.rotation;
        turnPair(a, b, args.rope.cos[angle], args.rope.sin[angle], args.rope.scale);
    }
    float* const out = staging + row * (kColumns + kStagingPadding);
    out[pair.place[0]] = a;
    out[pair.place[1]] = b;
}

//! The first channel of a run of kVector staged columns.
__device__ __forceinline__ int32_t channelOfRun(GemmArgs const& args, int32_t inHead, int32_t turning)
{
    bool const moved = inHead < turning && untangles(args);
    return moved ? (inHead & ~15) / 2 + (inHead & kVector ? turning / 2 : 0) : inHead;
}

//! Write a staged tile: \p kWidth channels of one head of one token at a time. \p thread: which of kThreads.
template <int kRows, int kColumns, int kThreads, int kWidth>
__device__ __forceinline__ void scatterPieces(GemmArgs const& args, MapGroup const& group, int32_t column,
    int32_t firstRow, float const* staging, int32_t thread)
{
    FieldView const& view = args.target[static_cast<int32_t>(group.field)];
    int32_t const turning = turningOf(args, group);
    for (int32_t i = thread; i < kRows * (kColumns / kWidth); i += kThreads)
    {
        int32_t const row = i / (kColumns / kWidth);
        int32_t const inTile = i % (kColumns / kWidth) * kWidth;
        int32_t const inGroup = column + inTile;
        TokenRow const token = args.rows[firstRow + row];
        if (token.sourceBlock < 0 || inGroup >= group.numHeads * args.headDim)
        {
            continue;
        }
        int32_t const inHead = inGroup % args.headDim;
        int32_t channel = channelOfColumn(inHead, turning, args.interleaved);
        if (kWidth > 1)
        {
            channel = channelOfRun(args, inHead, turning);
        }
        float const* const from = staging + row * (kColumns + kStagingPadding) + inTile;
        float y[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e)
        {
            y[e] = from[e];
        }
        int32_t const head = args.headLists[group.headList + inGroup / args.headDim];
        int64_t const index
            = headOffset(view, token.targetBlock, head, token.targetOffset) + channel * view.channelStride;
        storeElements<kWidth>(view.layers[group.layer], index, view.dtype, view.inverseScale, y);
    }
}

template <int kRows, int kColumns>
__device__ __forceinline__ void scatterTile(
    GemmArgs const& args, MapGroup const& group, int32_t column, int32_t firstRow, float const* staging)
{
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    if (args.takesVectors)
    {
        scatterPieces<kRows, kColumns, kGemmThreads, kVector>(args, group, column, firstRow, staging, thread);
    }
    else
    {
        scatterPieces<kRows, kColumns, kGemmThreads, 1>(args, group, column, firstRow, staging, thread);
    }
}

} // namespace trtllm_kvmap::kernels
