// The product for maps packed in float32: the same tiles, the same ending, ordinary multiply-adds. It is the exact lane
// for float32 caches, not a fast one.
#pragma once

#include "kernels/groupedGemm.cuh"

namespace trtllm_kvmap::kernels
{

struct PlainShape
{
    static constexpr int kRows = kNarrowTileRows;
    static constexpr int kColumns = kBlockColumns;
    static constexpr int kInputPitch = kBlockInputs + 4; // floats in a shared row of inputs
    static constexpr int kInputBytes = kRows * kInputPitch * static_cast<int>(sizeof(float));
    static constexpr int kWeightBytes = kBlockElements * static_cast<int>(sizeof(float));
    static constexpr int kSharedBytes = kInputBytes + kWeightBytes;
    static constexpr int kResident = 2;
    static constexpr int kThreadRows = 8;    // rows 16 apart
    static constexpr int kThreadColumns = 4; // neighbours: two pairs
    static_assert(stagingBytes(kRows, kColumns) <= kSharedBytes, "staging reuses the inputs' memory");
};

//! kWeightBytes: 4, or 1 for fp8-e4m3. Shared memory has a block's elements in the order in which they were packed.
template <int kWeightBytes>
__global__ void __launch_bounds__(kGemmThreads) plainGemm(__grid_constant__ GemmArgs const args)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    using Shape = PlainShape;
    float* const inputs = reinterpret_cast<float*>(shared);
    float* const weights = reinterpret_cast<float*>(shared + Shape::kInputBytes);
    int32_t const thread = static_cast<int32_t>(threadIdx.x);
    int32_t const firstRow = thread / 16;
    int32_t const firstColumn = thread % 16 * Shape::kThreadColumns;
    int32_t const numItems = args.numRowTiles * args.numTiles;
    for (int32_t index = static_cast<int32_t>(blockIdx.x); index < numItems; index += static_cast<int32_t>(gridDim.x))
    {
        WorkItem const item = workItem(args, index, Shape::kRows);
        float sums[Shape::kThreadRows][Shape::kThreadColumns] = {};
        for (int32_t block = 0; block < item.group.kBlocks; ++block)
        {
            for (int32_t i = thread; i < Shape::kRows * kBlockInputs / kVector; i += kGemmThreads)
            {
                int32_t const row = i / (kBlockInputs / kVector);
                int32_t const chunk = i % (kBlockInputs / kVector);
                float const* const x = inputChunk<float>(
                    args, item.group, block * (kBlockInputs / kVector) + chunk, item.firstRow + row)
                                           .first;
                for (int e = 0; e < kVector; ++e)
                {
                    inputs[row * Shape::kInputPitch + chunk * kVector + e] = x ? x[e] : 0.0f;
                }
            }
            int64_t const packed = item.group.weight
                + (static_cast<int64_t>(item.column / kBlockColumns) * item.group.kBlocks + block) * kBlockElements;
            for (int32_t i = thread; i < kBlockElements; i += kGemmThreads)
            {
                weights[i] = kWeightBytes == 1 ? decode8(static_cast<uint8_t const*>(args.weights)[packed + i])
                                               : static_cast<float const*>(args.weights)[packed + i];
            }
            __syncthreads();
            for (int32_t k = 0; k < kBlockInputs; ++k)
            {
#pragma unroll
                for (int c = 0; c < Shape::kThreadColumns; ++c)
                {
                    float const w = weights[weightIndex(firstColumn + c, k, 1, kWeightBytes)];
#pragma unroll
                    for (int r = 0; r < Shape::kThreadRows; ++r)
                    {
                        sums[r][c] = __fmaf_rn(inputs[(firstRow + 16 * r) * Shape::kInputPitch + k], w, sums[r][c]);
                    }
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int c = 0; c < Shape::kThreadColumns; c += 2)
        {
            ColumnPair const pair = columnPair<kWeightBytes == 1>(args, item.group, item.column, firstColumn + c);
#pragma unroll
            for (int r = 0; r < Shape::kThreadRows; ++r)
            {
                stagePair<Shape::kColumns, kWeightBytes == 1>(
                    args, pair, item.firstRow, firstRow + 16 * r, sums[r][c], sums[r][c + 1], inputs);
            }
        }
        __syncthreads();
        scatterTile<Shape::kRows, Shape::kColumns>(args, item.group, item.column, item.firstRow, inputs);
        __syncthreads();
    }
}

} // namespace trtllm_kvmap::kernels
