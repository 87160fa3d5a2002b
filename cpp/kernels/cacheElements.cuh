// Numbers in a KV cache as the kernels see them: where a head of a token begins, and reading and writing kWidth
// neighbouring channels: 8 with one access of up to 16 bytes, or 1 wherever strides or sizes forbid that.
//
// The dtype is looked at on the device: every thread takes the same branch, and these kernels wait for memory anyway.
// Arithmetic names its rounding (__fmaf_rn ...), so that every compiler gives the same bits.
#pragma once

#include "kernels/ptxPrimitives.cuh"
#include "kernels/workspaceLayout.h"

namespace trtllm_kvmap::kernels
{

constexpr int32_t kVector = 8;

//! Keys or values of a pool, small enough that three of them fit into a kernel's parameters.
struct FieldView
{
    void* layers[kMaxLayers];
    int64_t blockStride;
    int64_t headStride;
    int64_t tokenStride;
    int64_t channelStride;
    DType dtype;
    float scale;
    float inverseScale;
};

inline FieldView fieldView(PoolView const& pool, Field field)
{
    int32_t const f = static_cast<int32_t>(field);
    FieldView view{};
    for (int32_t layer = 0; layer < pool.numLayers; ++layer)
    {
        view.layers[layer] = pool.layers[f][layer];
    }
    view.blockStride = pool.blockStride;
    view.headStride = pool.headStride;
    view.tokenStride = pool.tokenStride;
    view.channelStride = pool.channelStride;
    view.dtype = pool.dtype;
    view.scale = pool.scale[f];
    view.inverseScale = 1.0f / pool.scale[f];
    return view;
}

//! Whether 8 channels that begin at a multiple of 8 can be read or written at once, anywhere in the pool.
inline bool takesVectors(PoolView const& pool)
{
    int64_t const alignment = std::min(16, kVector * sizeOf(pool.dtype)) / sizeOf(pool.dtype);
    bool aligned = pool.channelStride == 1 && pool.headDim % kVector == 0 && pool.blockStride % alignment == 0
        && pool.headStride % alignment == 0 && pool.tokenStride % alignment == 0;
    for (int32_t i = 0; i < 2 * pool.numLayers; ++i)
    {
        auto const address = reinterpret_cast<uintptr_t>(pool.layers[i % 2][i / 2]);
        aligned = aligned && address % (alignment * sizeOf(pool.dtype)) == 0;
    }
    return aligned;
}

__device__ __forceinline__ int64_t headOffset(FieldView const& view, int32_t block, int32_t head, int32_t offset)
{
    return block * view.blockStride + head * view.headStride + offset * view.tokenStride;
}

//! (a, b) = scale * (a cos - b sin, b cos + a sin); a negative sine turns backwards.
__device__ __forceinline__ void turnPair(float& a, float& b, float cos, float sin, float scale)
{
    float const turned = __fmaf_rn(a, cos, -__fmul_rn(b, sin));
    b = __fmul_rn(__fmaf_rn(b, cos, __fmul_rn(a, sin)), scale);
    a = __fmul_rn(turned, scale);
}

__device__ __forceinline__ float decode16(uint32_t bits, DType dtype)
{
    return dtype == DType::kBFLOAT16 ? __uint_as_float(bits << 16)
                                     : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

__device__ __forceinline__ float decode8(uint32_t bits)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bits), __NV_E4M3)));
}

__device__ __forceinline__ uint32_t encode16(float value, DType dtype)
{
    return dtype == DType::kBFLOAT16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                                     : __half_as_ushort(__float2half_rn(value));
}

__device__ __forceinline__ uint32_t encode8(float value)
{
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

//! x = real numbers of kWidth channels from element \p index on; kWidth > 1 needs aligned neighbours.
template <int kWidth>
__device__ __forceinline__ void loadElements(
    void const* base, int64_t index, DType dtype, float scale, float (&x)[kWidth]);

template <>
__device__ __forceinline__ void loadElements<1>(
    void const* base, int64_t index, DType dtype, float scale, float (&x)[1])
{
    float value;
    if (dtype == DType::kFLOAT32)
    {
        value = static_cast<float const*>(base)[index];
    }
    else if (dtype == DType::kFP8_E4M3)
    {
        value = decode8(static_cast<uint8_t const*>(base)[index]);
    }
    else
    {
        value = decode16(static_cast<uint16_t const*>(base)[index], dtype);
    }
    x[0] = __fmul_rn(value, scale);
}

template <>
__device__ __forceinline__ void loadElements<kVector>(
    void const* base, int64_t index, DType dtype, float scale, float (&x)[kVector])
{
    char const* const address = static_cast<char const*>(base) + index * sizeOf(dtype);
    if (dtype == DType::kFLOAT32)
    {
        uint4 const low = loadGlobal16(address);
        uint4 const high = loadGlobal16(address + 16);
        uint32_t const words[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            x[i] = __uint_as_float(words[i]);
        }
    }
    else if (dtype == DType::kFP8_E4M3)
    {
        uint2 const packed = *reinterpret_cast<uint2 const*>(address);
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            x[i] = decode8((i < 4 ? packed.x : packed.y) >> (8 * (i % 4)) & 0xffu);
        }
    }
    else
    {
        uint4 const packed = loadGlobal16(address);
        uint32_t const words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            x[i] = decode16(words[i / 2] >> (16 * (i % 2)) & 0xffffu, dtype);
        }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i)
    {
        x[i] = __fmul_rn(x[i], scale);
    }
}

//! Round y once each and write kWidth channels from element \p index on.
template <int kWidth>
__device__ __forceinline__ void storeElements(
    void* base, int64_t index, DType dtype, float inverseScale, float const (&y)[kWidth]);

template <>
__device__ __forceinline__ void storeElements<1>(
    void* base, int64_t index, DType dtype, float inverseScale, float const (&y)[1])
{
    float const value = __fmul_rn(y[0], inverseScale);
    if (dtype == DType::kFLOAT32)
    {
        static_cast<float*>(base)[index] = value;
    }
    else if (dtype == DType::kFP8_E4M3)
    {
        static_cast<uint8_t*>(base)[index] = static_cast<uint8_t>(encode8(value));
    }
    else
    {
        static_cast<uint16_t*>(base)[index] = static_cast<uint16_t>(encode16(value, dtype));
    }
}

template <>
__device__ __forceinline__ void storeElements<kVector>(
    void* base, int64_t index, DType dtype, float inverseScale, float const (&y)[kVector])
{
    char* const address = static_cast<char*>(base) + index * sizeOf(dtype);
    float v[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i)
    {
        v[i] = __fmul_rn(y[i], inverseScale);
    }
    if (dtype == DType::kFLOAT32)
    {
        storeGlobal16(address,
            make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
        storeGlobal16(address + 16,
            make_uint4(__float_as_uint(v[4]), __float_as_uint(v[5]), __float_as_uint(v[6]), __float_as_uint(v[7])));
    }
    else if (dtype == DType::kFP8_E4M3)
    {
        uint2 packed{};
#pragma unroll
        for (int i = 0; i < kVector; ++i)
        {
            (i < 4 ? packed.x : packed.y) |= encode8(v[i]) << (8 * (i % 4));
        }
        *reinterpret_cast<uint2*>(address) = packed;
    }
    else
    {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
        {
            words[i] = encode16(v[2 * i], dtype) | encode16(v[2 * i + 1], dtype) << 16;
        }
        storeGlobal16(address, make_uint4(words[0], words[1], words[2], words[3]));
    }
}

} // namespace trtllm_kvmap::kernels
