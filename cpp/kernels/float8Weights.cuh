// Weights kept as fp8-e4m3: copied and held in shared memory as they are, half the bytes, and widened in registers on
// the way into an mma. Their column scales wait for the end of a tile.
//
// packMap puts the 16 inputs of a step in such an order (float8Place) that one ldmatrix gives every thread its four
// weights of a column: the upper bytes of the two halves are b0's, the lower ones b1's.
#pragma once

#include "kernels/ptxPrimitives.cuh"

namespace trtllm_kvmap::kernels
{

//! The numbers of the upper bytes of both halves of \p codes, as a pair of T. Exact: a code's exponent and mantissa are
//! moved to T's place, subnormal codes become subnormal numbers, and a product with a power of two puts the bias right.
//! No NaN: packMap refuses weights that are none.
template <typename T>
__device__ __forceinline__ uint32_t widenFloat8(uint32_t codes);

template <>
__device__ __forceinline__ uint32_t widenFloat8<__nv_bfloat16>(uint32_t codes)
{
    constexpr uint32_t kPowersOf120 = 0x7b807b80u; // 2^(127 - 7), twice
    return multiplyPair<__nv_bfloat16>((codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u), kPowersOf120);
}

template <>
__device__ __forceinline__ uint32_t widenFloat8<__half>(uint32_t codes)
{
    constexpr uint32_t kPowersOf8 = 0x5c005c00u; // 2^(15 - 7), twice
    return multiplyPair<__half>((codes >> 1 & 0x3f803f80u) | (codes & 0x80008000u), kPowersOf8);
}

} // namespace trtllm_kvmap::kernels
