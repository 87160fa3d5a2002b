#pragma once

// What the Hopper kernel adds to ptxPrimitives.cuh: clusters, mbarriers, TMA boxes, wgmma. Needs sm_90a under nvcc; the
// same two bodies.

#include "kernels/ptxPrimitives.cuh"

#include <cuda.h>

#if defined(TRTLLM_KVMAP_EMULATE)
#include "emulator/hopper.h"
#endif

namespace trtllm_kvmap::kernels
{

// ---- clusters: blocks that run together and reach into each other's shared memory ---------------------------------

//! Of this block in its cluster.
__device__ __forceinline__ std::uint32_t clusterRank()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    return emulator::tThread->clusterRank;
#else
    std::uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
#endif
}

//! A barrier of all threads of the cluster. What they did before it, also in other blocks' shared memory, is done.
__device__ __forceinline__ void syncCluster()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::arriveCluster();
    emulator::waitCluster();
#else
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
#endif
}

//! The same place in the shared memory of the block \p rank, as an address of the cluster.
__device__ __forceinline__ std::uint32_t mapShared(std::uint32_t address, std::uint32_t rank)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    return emulator::mapShared(address, rank);
#else
    std::uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
#endif
}

// ---- registers ----------------------------------------------------------------------------------------------------

//! Give registers back, or take some that others gave back, so that each thread of this warpgroup has kCOUNT: a
//! multiple of 8, 24 to 256. All threads of the warpgroup. Changes no value, so the emulator does nothing.
template <int kCOUNT>
__device__ __forceinline__ void giveRegistersBack()
{
#if !defined(TRTLLM_KVMAP_EMULATE)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCOUNT));
#endif
}

template <int kCOUNT>
__device__ __forceinline__ void takeRegisters()
{
#if !defined(TRTLLM_KVMAP_EMULATE)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCOUNT));
#endif
}

// ---- mbarrier: 8 bytes of shared memory, 8-byte aligned -----------------------------------------------------------

//! Make a barrier whose phases take \p arrivals arrivals. One thread does it; the others may use it after
//! fenceMbarrierInit and a block barrier.
__device__ __forceinline__ void mbarrierInit(std::uint32_t barrier, std::uint32_t arrivals)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::initMbarrier(barrier, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

//! Make initialised mbarriers visible to the copy engine and, after a barrier of the cluster, to its blocks.
__device__ __forceinline__ void fenceMbarrierInit()
{
#if !defined(TRTLLM_KVMAP_EMULATE)
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}

//! Make this thread's ordinary stores to shared memory visible to wgmma and the copy engine. Not seen by the emulator.
__device__ __forceinline__ void fenceProxyAsync()
{
#if !defined(TRTLLM_KVMAP_EMULATE)
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrierArrive(std::uint32_t barrier)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::arriveMbarrier(barrier, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
#endif
}

//! Arrive at a barrier of another block of the cluster (mapShared). Orders no ordinary memory between the blocks: that
//! would take .release.cluster, and a fence as wide as the GPU before every arrival.
__device__ __forceinline__ void mbarrierArriveCluster(std::uint32_t mapped)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::arriveClusterMbarrier(mapped);
#else
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(mapped) : "memory");
#endif
}

//! Arrive, and let the phase wait for \p bytes of TMA copies as well.
__device__ __forceinline__ void mbarrierArriveExpectBytes(std::uint32_t barrier, std::uint32_t bytes)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::arriveMbarrier(barrier, bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

//! Whether the phase of \p parity is complete; may come back with false before it is. The first phase has parity 0.
__device__ __forceinline__ bool mbarrierTryWait(std::uint32_t barrier, std::uint32_t parity)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    return emulator::tryWaitMbarrier(barrier, parity);
#else
    std::uint32_t complete;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}\n"
                 : "=r"(complete)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return complete != 0;
#endif
}

__device__ __forceinline__ void mbarrierWait(std::uint32_t barrier, std::uint32_t parity)
{
    while (!mbarrierTryWait(barrier, parity))
    {
    }
}

// ---- TMA ----------------------------------------------------------------------------------------------------------

//! Copy one box of a tensor to shared memory (128-byte aligned; 1024 with a 128-byte swizzle). \p map lies in kernel
//! parameters (__grid_constant__). Coordinates are in elements, innermost first; what lies outside is zero. All bytes
//! of the box complete at \p barrier.
__device__ __forceinline__ void tmaLoad2D(
    std::uint32_t destination, CUtensorMap const* map, std::int32_t x, std::int32_t y, std::uint32_t barrier)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    std::int32_t const coordinates[2] { x, y };
    emulator::copyTensorBox(destination, map, 2, coordinates, barrier);
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n" ::
            "r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
#endif
}

//! The same to every block of the cluster whose bit is set in \p blocks: to the same place, and its bytes complete at
//! the barrier of the same place there.
__device__ __forceinline__ void tmaMulticast2D(std::uint32_t destination, CUtensorMap const* map, std::int32_t x,
    std::int32_t y, std::uint32_t barrier, std::uint16_t blocks)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    std::int32_t const coordinates[2] { x, y };
    emulator::multicastTensorBox(destination, map, 2, coordinates, barrier, blocks);
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;\n" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
        : "memory");
#endif
}

// ---- wgmma --------------------------------------------------------------------------------------------------------

//! Descriptor of a K-major operand of 16-bit elements with a 128-byte swizzle: rows of 64 elements, in groups of eight
//! rows that lie 1024 bytes apart. Each further 16 elements of K are 32 bytes on in \p address.
__device__ __forceinline__ std::uint64_t wgmmaDescriptor(std::uint32_t address)
{
    constexpr std::uint64_t kGROUP_BYTES = 1024;
    constexpr std::uint64_t kSWIZZLE_128 = 1;
    return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | std::uint64_t { 1 } << 16 | (kGROUP_BYTES >> 4) << 32
        | kSWIZZLE_128 << 62;
}

//! Before the first wgmma, and whenever ordinary code has changed its registers.
__device__ __forceinline__ void wgmmaFence()
{
#if !defined(TRTLLM_KVMAP_EMULATE)
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmmaCommit()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::commitWarpgroup();
#else
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}

template <int kPendingGroups>
__device__ __forceinline__ void wgmmaWait()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::waitWarpgroup(kPendingGroups);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPendingGroups) : "memory");
#endif
}

//! D[64, N] = A[64, 16] B[N, 16]^T (+ D when \p add), both from shared memory by descriptors, N = 64, 128 or 256, bf16,
//! float32 accumulators. D may be read after the wait. Accumulators 4 j to 4 j + 3 of a thread are those of
//! mma.m16n8k16 for rows 16 warp... and columns 8 j...
__device__ __forceinline__ void wgmmaBf16(float (&d)[32], std::uint64_t a, std::uint64_t b, bool add)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::warpgroupMultiply(emulator::MmaType::kBF16, 64, d, a, nullptr, b, add, false);
#else
    // clang-format off
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
          "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
    // clang-format on
#endif
}

__device__ __forceinline__ void wgmmaBf16(float (&d)[64], std::uint64_t a, std::uint64_t b, bool add)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::warpgroupMultiply(emulator::MmaType::kBF16, 128, d, a, nullptr, b, add, false);
#else
    // clang-format off
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
          "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
          "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
    // clang-format on
#endif
}

__device__ __forceinline__ void wgmmaBf16(float (&d)[128], std::uint64_t a, std::uint64_t b, bool add)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    emulator::warpgroupMultiply(emulator::MmaType::kBF16, 256, d, a, nullptr, b, add, false);
#else
    // clang-format off
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
          "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
          "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]),
          "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]),
          "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
          "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),
          "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
          "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
          "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
          "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]),
          "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
    // clang-format on
#endif
}

} // namespace trtllm_kvmap::kernels
