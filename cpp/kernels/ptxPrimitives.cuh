#pragma once

// The PTX instructions the kernels are made of. Each has two bodies: inline assembly under nvcc, the emulator under
// g++ (TRTLLM_KVMAP_EMULATE). No other file of the kernels tells the two apart.
//
// Shared memory is addressed by 32-bit shared addresses (sharedAddress). Fragments are those of the PTX ISA.

#include <cstdint>

#if defined(TRTLLM_KVMAP_EMULATE)
#include "emulator/cudaEmulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
//! Name the block's dynamic shared memory: unsigned char[], 1024-byte aligned.
#define TRTLLM_KVMAP_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

namespace trtllm_kvmap::kernels
{

//! The shared address of a pointer into shared memory.
__device__ __forceinline__ std::uint32_t sharedAddress(void const* pointer)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    return emulator::sharedAddress(pointer);
#else
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
#endif
}

//! Start an asynchronous copy of 16 bytes from global to shared memory, both 16-byte aligned. When not \p valid the
//! destination is filled with zeros and \p source is not read.
__device__ __forceinline__ void cpAsync16(std::uint32_t destination, void const* source, bool valid)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::asyncCopy16(destination, source, valid);
#else
    std::uint32_t const sourceBytes = valid ? 16 : 0;
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(sourceBytes)
        : "memory");
#endif
}

//! Close the group of the copies this thread has started since the last commit; an empty group is legal.
__device__ __forceinline__ void cpAsyncCommit()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::asyncCommit();
#else
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

//! Wait until at most \p kPendingGroups of this thread's groups are in flight. Other threads see the data after a
//! barrier.
template <int kPendingGroups>
__device__ __forceinline__ void cpAsyncWait()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::asyncWait(kPendingGroups);
#else
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPendingGroups) : "memory");
#endif
}

//! Load four 8x8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8, and receives
//! elements (lane / 4, 2 (lane % 4)) and the one after it of each matrix.
__device__ __forceinline__ void ldmatrixX4(std::uint32_t (&destination)[4], std::uint32_t address)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::loadMatrix(destination, address, false);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(destination[0]), "=r"(destination[1]), "=r"(destination[2]), "=r"(destination[3])
                 : "r"(address)
                 : "memory");
#endif
}

//! As ldmatrixX4, each matrix transposed.
__device__ __forceinline__ void ldmatrixX4Trans(std::uint32_t (&destination)[4], std::uint32_t address)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::loadMatrix(destination, address, true);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(destination[0]), "=r"(destination[1]), "=r"(destination[2]), "=r"(destination[3])
                 : "r"(address)
                 : "memory");
#endif
}

//! D[16, 8] += A[16, 16] B[16, 8], A row-major, B column-major, of T = __nv_bfloat16 or __half, D float32.
template <typename T>
__device__ __forceinline__ void mmaM16N8K16(
    float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1);

template <>
__device__ __forceinline__ void mmaM16N8K16<__nv_bfloat16>(
    float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::multiplyAccumulate(emulator::MmaType::kBF16, d, a, b0, b1);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

template <>
__device__ __forceinline__ void mmaM16N8K16<__half>(
    float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::multiplyAccumulate(emulator::MmaType::kFP16, d, a, b0, b1);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

//! The products of two pairs of T, each rounded once; subnormal numbers are kept.
template <typename T>
__device__ __forceinline__ std::uint32_t multiplyPair(std::uint32_t a, std::uint32_t b);

template <>
__device__ __forceinline__ std::uint32_t multiplyPair<__nv_bfloat16>(std::uint32_t a, std::uint32_t b)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    return emulator::multiplyPair(emulator::MmaType::kBF16, a, b);
#else
    std::uint32_t product; // a b - 0: sm_80 has no other product of bf16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
#endif
}

template <>
__device__ __forceinline__ std::uint32_t multiplyPair<__half>(std::uint32_t a, std::uint32_t b)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    return emulator::multiplyPair(emulator::MmaType::kFP16, a, b);
#else
    std::uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(product) : "r"(a), "r"(b));
    return product;
#endif
}

//! Read 16 bytes of global memory that nothing writes during the kernel; \p address is 16-byte aligned.
__device__ __forceinline__ uint4 loadGlobal16(void const* address)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::checkGlobal(address, 16, "ld.global.v4");
    return *static_cast<uint4 const*>(address);
#else
    uint4 value;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
#endif
}

//! Write 16 bytes of global memory; \p address is 16-byte aligned.
__device__ __forceinline__ void storeGlobal16(void* address, uint4 value)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::checkGlobal(address, 16, "st.global.v4");
    *static_cast<uint4*>(address) = value;
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
#endif
}

} // namespace trtllm_kvmap::kernels
