#pragma once

// CUDA C++ on a CPU, for tests. A kernel's .cu and .cuh files are compiled by g++ with TRTLLM_KVMAP_EMULATE defined
// and include this header instead of the CUDA runtime; every .cpp of this folder is linked to them. One fiber runs one
// CUDA thread. What is and what is not modelled: docs/emulator.md.
//
//   g++ -std=c++17 -O2 -march=native -ffp-contract=off -DTRTLLM_KVMAP_EMULATE -I cpp -I <cuda>/include
//       -x c++ kernel.cu cpp/emulator/*.cpp -ldl -lpthread

#if defined(__CUDACC__)
#error "cudaEmulator.h stands in for the CUDA runtime; nvcc needs none of it."
#endif

// NVIDIA's own headers, in host mode: exact bf16, fp16 and fp8 conversions, dim3, uint4, cudaStream_t.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <driver_types.h>
#include <vector_types.h>

#include "emulator/launch.h"
#include "emulator/warp.h"

// ---- What a kernel's source says that C++ does not ----------------------------------------------------------------

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
// Static shared memory is not modelled; the name in the compiler's error says what to use instead.
#define __shared__ use_TRTLLM_KVMAP_DYNAMIC_SHARED_instead_of_static_shared_memory
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))

#define threadIdx (::trtllm_kvmap::emulator::tThread->threadIndex)
#define blockIdx (::trtllm_kvmap::emulator::tThread->blockIndex)
#define blockDim (::trtllm_kvmap::emulator::tThread->blockShape)
#define gridDim (::trtllm_kvmap::emulator::tThread->gridShape)

//! The block's dynamic shared memory, 1024-byte aligned, under a name: nvcc's twin is in kernels/ptxPrimitives.cuh.
#define TRTLLM_KVMAP_DYNAMIC_SHARED(name) unsigned char* const name = ::trtllm_kvmap::emulator::sharedMemory()

inline void __syncthreads()
{
    ::trtllm_kvmap::emulator::syncThreads();
}

//! Whole warps only: a mask that leaves lanes out is reported as an error.
inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    ::trtllm_kvmap::emulator::syncWarp(mask);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int sourceLane, int width = 32)
{
    return ::trtllm_kvmap::emulator::shuffle(mask, value, ::trtllm_kvmap::emulator::Shuffle::kINDEX, sourceLane, width);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    return ::trtllm_kvmap::emulator::shuffle(
        mask, value, ::trtllm_kvmap::emulator::Shuffle::kUP, static_cast<int>(delta), width);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    return ::trtllm_kvmap::emulator::shuffle(
        mask, value, ::trtllm_kvmap::emulator::Shuffle::kDOWN, static_cast<int>(delta), width);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int laneMask, int width = 32)
{
    return ::trtllm_kvmap::emulator::shuffle(mask, value, ::trtllm_kvmap::emulator::Shuffle::kXOR, laneMask, width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return ::trtllm_kvmap::emulator::ballot(mask, predicate != 0);
}

inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) == 0xffffffffu;
}

// ---- Memory -------------------------------------------------------------------------------------------------------

template <typename T>
T __ldg(T const* address)
{
    return *address;
}

template <typename T>
T atomicAdd(T* address, T value)
{
    return ::trtllm_kvmap::emulator::atomicUpdate(address, [value](T old) { return static_cast<T>(old + value); });
}

template <typename T>
T atomicMax(T* address, T value)
{
    return ::trtllm_kvmap::emulator::atomicUpdate(address, [value](T old) { return old < value ? value : old; });
}

template <typename T>
T atomicMin(T* address, T value)
{
    return ::trtllm_kvmap::emulator::atomicUpdate(address, [value](T old) { return value < old ? value : old; });
}

template <typename T>
T atomicExch(T* address, T value)
{
    return ::trtllm_kvmap::emulator::atomicUpdate(address, [value](T) { return value; });
}

template <typename T>
T atomicCAS(T* address, T expected, T value)
{
    return ::trtllm_kvmap::emulator::atomicUpdate(
        address, [expected, value](T old) { return old == expected ? value : old; });
}

inline void __threadfence()
{
    ::trtllm_kvmap::emulator::threadFence();
}

// ---- Arithmetic whose rounding is spelled out, so that g++ (-ffp-contract=off) and nvcc agree to the bit -----------

inline float __fmaf_rn(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

inline float __fmul_rn(float a, float b)
{
    return a * b;
}

inline float __fadd_rn(float a, float b)
{
    return a + b;
}

inline float __fsub_rn(float a, float b)
{
    return a - b;
}

inline float __fdiv_rn(float a, float b)
{
    return a / b;
}

inline float __uint_as_float(unsigned bits)
{
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

inline unsigned __float_as_uint(float value)
{
    unsigned bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline int __popc(unsigned bits)
{
    return __builtin_popcount(bits);
}

inline int __clz(int bits)
{
    return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits));
}

inline int __ffs(int bits)
{
    return __builtin_ffs(bits);
}
