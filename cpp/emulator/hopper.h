#pragma once

// What sm_90a adds: clusters, mbarriers, TMA boxes, wgmma.

#include "emulator/warp.h"

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace trtllm_kvmap::emulator
{

// ---- mbarrier: 8 bytes of shared memory, 8-byte aligned -------------------------------------------------------------

void initMbarrier(std::uint32_t address, std::uint32_t arrivals);

//! One arrival; \p bytes more must come (arrive.expect_tx) before the phase is complete.
void arriveMbarrier(std::uint32_t address, std::uint32_t bytes);

//! expect_tx without an arrival.
void expectMbarrierBytes(std::uint32_t address, std::uint32_t bytes);

//! try_wait.parity: whether the phase of this parity is complete. Waits for it, or comes back early with false.
bool tryWaitMbarrier(std::uint32_t address, std::uint32_t parity);

//! mapa.shared::cluster: the same place in the shared memory of the block \p rank of the cluster.
std::uint32_t mapShared(std::uint32_t address, std::uint32_t rank);

//! mbarrier.arrive at an address of the cluster (mapShared). It comes some time later, before anything that
//! barrier.cluster orders behind it.
void arriveClusterMbarrier(std::uint32_t address);

// ---- TMA ----------------------------------------------------------------------------------------------------------

enum class Swizzle : int
{
    kNONE = 0,
    k32_BYTES = 1,
    k64_BYTES = 2,
    k128_BYTES = 3,
};

constexpr int kMAX_RANK = 5;

//! cuTensorMapEncodeTiled, of a tensor in host memory: \p sizes, \p box in elements, innermost first; \p strides in
//! bytes, of dimensions 1 to rank - 1, multiples of 16. Elements beyond the tensor are zeros. Returns nullptr, or what
//! the driver would refuse.
char const* encodeTensorMap(CUtensorMap& map, int rank, int elementBytes, void* global, std::uint64_t const* sizes,
    std::uint64_t const* strides, std::uint32_t const* box, Swizzle swizzle);

//! cp.async.bulk.tensor of one box to shared memory; its bytes complete at \p mbarrier. \p coordinates innermost first.
void copyTensorBox(std::uint32_t destination, CUtensorMap const* map, int rank, std::int32_t const* coordinates,
    std::uint32_t mbarrier);

//! The same with .multicast::cluster: to the same places in every block of the cluster whose bit is set in \p blocks,
//! each at its own moment.
void multicastTensorBox(std::uint32_t destination, CUtensorMap const* map, int rank, std::int32_t const* coordinates,
    std::uint32_t mbarrier, std::uint32_t blocks);

// ---- wgmma --------------------------------------------------------------------------------------------------------

//! wgmma.mma_async.m64nNk16: D[64, columns] = A B (+ D), A and B K-major in shared memory with 128-byte swizzle, told
//! by descriptors. \p accumulators: columns / 2 floats of this thread. \p aRegisters: A of this thread instead of \p a.
//! \p atIssue: compute at once, for callers that copy the accumulators away before the wait.
void warpgroupMultiply(MmaType type, int columns, float* accumulators, std::uint64_t a, std::uint32_t const* aRegisters,
    std::uint64_t b, bool addToD, bool atIssue);

void commitWarpgroup();
void waitWarpgroup(int pendingGroups);

} // namespace trtllm_kvmap::emulator
