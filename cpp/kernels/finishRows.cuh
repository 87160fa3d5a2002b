// The end of a tile of the Hopper kernel, by each warp for itself, eight rows at a time: bias and rotation, a few rows
// of floats in shared memory, from there whole pieces into the target's blocks. Any tile ends as finishTile.cuh does
// it; a tile that is one head of 128, as most models have them, in half the instructions, because its columns are known
// beforehand: the tensor cores wait meanwhile.
#pragma once

#include "kernels/finishTile.cuh"

namespace trtllm_kvmap::kernels
{

constexpr int32_t kStagedRows = 8;

//! Whether the tiles of a group are heads, which turn as a whole or not at all, written in whole vectors.
template <int kColumns>
__device__ __forceinline__ bool tilesAreHeads(GemmArgs const& args, MapGroup const& group)
{
    int32_t const turning = turningOf(args, group);
    return args.headDim == kColumns && (turning == 0 || turning == kColumns) && args.takesVectors;
}

//! Bias and rotate eight rows of a product, from \p firstRow on, of the head that begins at column \p column, and leave
//! them in \p staging. kHalf: which rows of each 16 of the accumulators, upper or lower eight.
template <int kHalf, int kColumns, int kSums>
__device__ __forceinline__ void stageHeadRows(GemmArgs const& args, MapGroup const& group, int32_t column,
    int32_t firstRow, float const (&sums)[kSums], float* staging, int32_t lane)
{
    constexpr int kAtOnce = 4; // pairs whose loads are on their way together
    bool const turns = turningOf(args, group) > 0;
    bool const moves = turns && untangles(args);
    float const* const biases = args.bias + group.bias + column + 2 * (lane % 4);
    int64_t const angle
        = static_cast<int64_t>(args.rows[firstRow + lane / 4].position) * (args.rotaryDim / 2) + lane % 4;
    float const* const cos = args.rope.cos + angle;
    float const* const sin = args.rope.sin + angle;
    float* const out = staging + lane / 4 * (kColumns + kStagingPadding) + (moves ? lane % 4 : 2 * (lane % 4));
    int32_t const distance = moves ? kVector : 1; // between the two of a pair
#pragma unroll
    for (int first = 0; first < kColumns / 8; first += kAtOnce)
    {
        float bias[kAtOnce][2];
        float turn[kAtOnce][2]; // cosine and sine
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
        {
            int const j = first + n;
            bias[n][0] = biases[8 * j];
            bias[n][1] = biases[8 * j + 1];
            turn[n][0] = turns ? cos[4 * j] : 1.0f;
            turn[n][1] = turns ? sin[4 * j] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
        {
            int const j = first + n;
            float const a = __fadd_rn(sums[4 * j + 2 * kHalf], bias[n][0]);
            float const b = __fadd_rn(sums[4 * j + 2 * kHalf + 1], bias[n][1]);
            float turnedA = a;
            float turnedB = b;
            turnPair(turnedA, turnedB, turn[n][0], turn[n][1], args.rope.scale);
            float* const to = out + 8 * j - (moves ? j % 2 * 4 : 0);
            to[0] = turns ? turnedA : a;
            to[distance] = turns ? turnedB : b;
        }
    }
}

//! Write eight staged rows of a head, a lane the same channels of every other row.
template <int kColumns>
__device__ __forceinline__ void writeHeadRows(GemmArgs const& args, MapGroup const& group, int32_t column,
    int32_t firstRow, float const* staging, int32_t lane)
{
    constexpr int kRuns = kColumns / kVector;
    constexpr int kRowsAtOnce = 32 / kRuns;
    FieldView const& view = args.target[static_cast<int32_t>(group.field)];
    int32_t const head = args.headLists[group.headList + column / kColumns];
    int32_t const inHead = lane % kRuns * kVector;
    int64_t const channel = channelOfRun(args, inHead, turningOf(args, group)) * view.channelStride;
#pragma unroll
    for (int i = 0; i < kStagedRows / kRowsAtOnce; ++i)
    {
        int32_t const row = lane / kRuns + i * kRowsAtOnce;
        TokenRow const token = args.rows[firstRow + row];
        if (token.sourceBlock < 0)
        {
            continue;
        }
        auto const* const from
            = reinterpret_cast<float4 const*>(staging + row * (kColumns + kStagingPadding) + inHead);
        float4 const low = from[0];
        float4 const high = from[1];
        float const y[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        int64_t const index = headOffset(view, token.targetBlock, head, token.targetOffset) + channel;
        storeElements<kVector>(view.layers[group.layer], index, view.dtype, view.inverseScale, y);
    }
}

//! Eight rows of any tile, the same two steps.
template <int kHalf, int kColumns, int kSums>
__device__ __forceinline__ void stageTileRows(GemmArgs const& args, MapGroup const& group, int32_t column,
    int32_t firstRow, float const (&sums)[kSums], float* staging, int32_t lane)
{
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
    {
        ColumnPair const pair = columnPair<false>(args, group, column, 8 * j + 2 * (lane % 4));
        stagePair<kColumns, false>(args, pair, firstRow, lane / 4, sums[4 * j + 2 * kHalf], sums[4 * j + 2 * kHalf + 1],
            staging);
    }
}

template <int kColumns>
__device__ __forceinline__ void writeTileRows(GemmArgs const& args, MapGroup const& group, int32_t column,
    int32_t firstRow, float const* staging, int32_t lane)
{
    if (args.takesVectors)
    {
        scatterPieces<kStagedRows, kColumns, 32, kVector>(args, group, column, firstRow, staging, lane);
    }
    else
    {
        scatterPieces<kStagedRows, kColumns, 32, 1>(args, group, column, firstRow, staging, lane);
    }
}

//! Eight rows of a product: the upper or lower eight of each 16 of a warp's accumulators.
template <int kHalf, int kColumns, int kSums>
__device__ __forceinline__ void finishRows(GemmArgs const& args, MapGroup const& group, int32_t column, bool isHead,
    int32_t firstRow, float const (&sums)[kSums], float* staging, int32_t lane)
{
    if (isHead)
    {
        stageHeadRows<kHalf, kColumns>(args, group, column, firstRow, sums, staging, lane);
        __syncwarp();
        writeHeadRows<kColumns>(args, group, column, firstRow, staging, lane);
    }
    else
    {
        stageTileRows<kHalf, kColumns>(args, group, column, firstRow, sums, staging, lane);
        __syncwarp();
        writeTileRows<kColumns>(args, group, column, firstRow, staging, lane);
    }
    __syncwarp(); // the next rows take their place
}

} // namespace trtllm_kvmap::kernels
