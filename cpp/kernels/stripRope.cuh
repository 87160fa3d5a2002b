// Once per source slice: gather its tokens from the paged pool, take the rotation off keys, and lay it down as plain
// rows [slice][token][width] of the compute type. A source layer feeds about a dozen target layers; doing this inside
// the product would repeat it for each of them and each of their column tiles.
#pragma once

#include "kernels/cacheElements.cuh"

namespace trtllm_kvmap::kernels
{

constexpr int32_t kStripThreads = 256;

struct StripArgs
{
    FieldView source[2]; // by Field
    TokenTable own;
    Slice const* slices; // [gridDim.y], all of one origin
    TokenRow const* rows;
    void* out;           // [slice][chunkTokens][width] of outType
    DType outType;
    ModelShape shape;    // of the slices' model
    RopeTable rope;
    float inverseRopeScale;
    int32_t chunkTokens;
    int32_t numRows;
    int32_t width;
};

//! Where the head begins that a slice reads for one token.
struct HeadSource
{
    void const* base;
    int64_t offset;
    int64_t channelStride;
    DType dtype;
    float scale;
};

__device__ __forceinline__ HeadSource headSource(
    FieldView const (&source)[2], TokenTable const& own, ModelShape const& shape, Slice const& s, TokenRow const& row)
{
    int32_t const field = static_cast<int32_t>(s.field);
    if (s.origin == Origin::kTARGET)
    {
        int64_t const offset = (static_cast<int64_t>(row.tokenId) * shape.numKvHeads + s.head) * shape.headDim;
        return {own.fields[field], offset, 1, own.dtype, 1.0f};
    }
    FieldView const& view = source[field];
    return {view.layers[s.layer], headOffset(view, row.sourceBlock, s.head, row.sourceOffset), view.channelStride,
        view.dtype, view.scale};
}

//! A thread takes 2 kWidth channels of one token: kWidth RoPE pairs where channels turn, neighbours where they do not.
template <int kWidth>
__global__ void __launch_bounds__(kStripThreads) stripRope(__grid_constant__ StripArgs const args)
{
    int32_t const unitsPerRow = (args.width + 2 * kWidth - 1) / (2 * kWidth);
    int32_t const index = static_cast<int32_t>(blockIdx.x * kStripThreads + threadIdx.x);
    int32_t const token = index / unitsPerRow;
    int32_t const unit = index % unitsPerRow;
    if (token >= args.numRows)
    {
        return;
    }
    Slice const s = args.slices[blockIdx.y];
    TokenRow const row = args.rows[token];
    int32_t const turning = s.origin == Origin::kSOURCE && s.field == Field::kKEY ? args.shape.rotaryDim : 0;
    bool const turns = 2 * kWidth * unit < turning;
    bool const split = turns && !args.shape.interleaved;
    int32_t const first = split ? unit * kWidth : 2 * unit * kWidth;
    int32_t const second = split ? turning / 2 + first : first + kWidth;

    float x[kWidth] = {};
    float y[kWidth] = {};
    if (row.sourceBlock >= 0)
    {
        HeadSource const head = headSource(args.source, args.own, args.shape, s, row);
        if (first < args.shape.headDim)
        {
            loadElements<kWidth>(head.base, head.offset + first * head.channelStride, head.dtype, head.scale, x);
        }
        if (second < args.shape.headDim)
        {
            loadElements<kWidth>(head.base, head.offset + second * head.channelStride, head.dtype, head.scale, y);
        }
        if (turns)
        {
            int64_t const pair = static_cast<int64_t>(row.position) * (turning / 2) + unit * kWidth;
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
            {
                float const cos = args.rope.cos[pair + i];
                float const sin = -args.rope.sin[pair + i];
                if (split || kWidth == 1)
                {
                    turnPair(x[i], y[i], cos, sin, args.inverseRopeScale);
                }
                else if (2 * i < kWidth)
                {
                    turnPair(x[2 * i % kWidth], x[(2 * i + 1) % kWidth], cos, sin, args.inverseRopeScale);
                }
                else
                {
                    turnPair(y[2 * i % kWidth], y[(2 * i + 1) % kWidth], cos, sin, args.inverseRopeScale);
                }
            }
        }
    }
    int64_t const out = (static_cast<int64_t>(blockIdx.y) * args.chunkTokens + token) * args.width;
    storeElements<kWidth>(args.out, out + first, args.outType, 1.0f, x);
    if (second < args.width)
    {
        storeElements<kWidth>(args.out, out + second, args.outType, 1.0f, y);
    }
}

} // namespace trtllm_kvmap::kernels
