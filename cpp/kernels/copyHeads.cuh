// Heads that are copied: one warp per token and head. A head whose numbers need no change is moved bit by bit; any
// other is turned back, turned on, and rounded once, in float32, without passing through the workspace.
#pragma once

#include "kernels/stripRope.cuh"

namespace trtllm_kvmap::kernels
{

constexpr int32_t kCopyThreads = 256;
constexpr int32_t kCopyWarps = kCopyThreads / 32;
constexpr int32_t kCopySharedBytes = kCopyWarps * kMaxHeadDim * static_cast<int32_t>(sizeof(float));

//! Copies into one field of the target; entries of the other field are passed over.
struct CopyArgs
{
    FieldView source[2]; // by Field
    FieldView target;
    Field field;
    TokenTable own;
    CopyHead const* copies; // [gridDim.y]
    TokenRow const* rows;
    ModelShape sourceShape;
    ModelShape targetShape;
    RopeTable sourceRope;
    RopeTable targetRope;
    float inverseSourceRopeScale;
    int32_t sameRotation;
    int32_t sameNumbers; // dtype and this field's scale are equal on both sides
    int32_t takesVectors;
    int32_t numRows;
};

//! Turn a head in shared memory, its pairs spread over the warp.
__device__ __forceinline__ void turnHead(
    float* x, RopeTable const& rope, ModelShape const& shape, int32_t position, float scale, bool forwards)
{
    int32_t const half = shape.rotaryDim / 2;
    __syncwarp();
    for (int32_t i = static_cast<int32_t>(threadIdx.x) % 32; i < half; i += 32)
    {
        int64_t const pair = static_cast<int64_t>(position) * half + i;
        float const sin = rope.sin[pair];
        turnPair(x[shape.interleaved ? 2 * i : i], x[shape.interleaved ? 2 * i + 1 : i + half], rope.cos[pair],
            forwards ? sin : -sin, scale);
    }
    __syncwarp();
}

template <typename T>
__device__ __forceinline__ void moveElements(
    HeadSource const& from, void* to, int64_t toIndex, int64_t toStride, int32_t count)
{
    for (int32_t i = static_cast<int32_t>(threadIdx.x) % 32; i < count; i += 32)
    {
        static_cast<T*>(to)[toIndex + i * toStride]
            = static_cast<T const*>(from.base)[from.offset + i * from.channelStride];
    }
}

//! The very bits of a head.
__device__ __forceinline__ void moveHead(CopyArgs const& args, HeadSource const& from, void* to, int64_t toIndex)
{
    int32_t const count = args.targetShape.headDim;
    int32_t const bytes = sizeOf(from.dtype);
    if (args.takesVectors && count * bytes % 16 == 0 && bytes > 1)
    {
        char const* const source = static_cast<char const*>(from.base) + from.offset * bytes;
        char* const target = static_cast<char*>(to) + toIndex * bytes;
        for (int32_t i = static_cast<int32_t>(threadIdx.x) % 32; i < count * bytes / 16; i += 32)
        {
            storeGlobal16(target + 16 * i, loadGlobal16(source + 16 * i));
        }
    }
    else if (bytes == 4)
    {
        moveElements<uint32_t>(from, to, toIndex, args.target.channelStride, count);
    }
    else if (bytes == 2)
    {
        moveElements<uint16_t>(from, to, toIndex, args.target.channelStride, count);
    }
    else
    {
        moveElements<uint8_t>(from, to, toIndex, args.target.channelStride, count);
    }
}

__global__ void __launch_bounds__(kCopyThreads) copyHeads(__grid_constant__ CopyArgs const args)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    int32_t const warp = static_cast<int32_t>(threadIdx.x) / 32;
    int32_t const lane = static_cast<int32_t>(threadIdx.x) % 32;
    int32_t const token = static_cast<int32_t>(blockIdx.x) * kCopyWarps + warp;
    CopyHead const copy = args.copies[blockIdx.y];
    // All of a warp leaves or stays.
    if (token >= args.numRows || copy.field != args.field || args.rows[token].sourceBlock < 0)
    {
        return;
    }
    TokenRow const row = args.rows[token];
    bool const isKey = copy.field == Field::kKEY;
    bool const asStored = copy.plain && (!isKey || args.sameRotation);
    // The target's own slices have another shape only in name: a copy needs equal head sizes.
    HeadSource const from = headSource(args.source, args.own, args.targetShape, copy.slice, row);
    void* const to = args.target.layers[copy.layer];
    int64_t const toIndex = headOffset(args.target, row.targetBlock, copy.head, row.targetOffset);
    if (asStored && args.sameNumbers)
    {
        moveHead(args, from, to, toIndex);
        return;
    }
    float* const x = reinterpret_cast<float*>(shared) + warp * kMaxHeadDim;
    for (int32_t i = lane; i < args.targetShape.headDim; i += 32)
    {
        float element[1];
        loadElements<1>(from.base, from.offset + i * from.channelStride, from.dtype, from.scale, element);
        x[i] = element[0];
    }
    bool const sourceKey = copy.slice.origin == Origin::kSOURCE && copy.slice.field == Field::kKEY;
    if (sourceKey && !asStored)
    {
        turnHead(x, args.sourceRope, args.sourceShape, row.position, args.inverseSourceRopeScale, false);
    }
    if (isKey && !asStored)
    {
        turnHead(x, args.targetRope, args.targetShape, row.position, args.targetRope.scale, true);
    }
    __syncwarp();
    for (int32_t i = lane; i < args.targetShape.headDim; i += 32)
    {
        float const element[1] = {x[i]};
        storeElements<1>(
            to, toIndex + i * args.target.channelStride, args.target.dtype, args.target.inverseScale, element);
    }
}

} // namespace trtllm_kvmap::kernels
