// Kernels on mbarriers, TMA and wgmma, called from Python through C functions.

#include "kernels/launchKernel.cuh"
#include "kernels/ptxHopper.cuh"
#include "kernels/tensorMaps.cuh"

namespace hopper
{

using namespace trtllm_kvmap::kernels;

constexpr int kWARPGROUP = 128;

// ---- TMA ----------------------------------------------------------------------------------------------------------

//! One box to shared memory, and its bytes to \p out. \p wait 0: do not wait for it. \p extra: bytes expected too many.
__global__ void tmaKernel(
    const __grid_constant__ CUtensorMap map, int x, int y, int bytes, int wait, int extra, unsigned char* out)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    std::uint32_t const box = sharedAddress(shared);
    std::uint32_t const barrier = box + static_cast<std::uint32_t>(bytes);
    if (threadIdx.x == 0)
    {
        mbarrierInit(barrier, 1);
        fenceMbarrierInit();
    }
    __syncthreads();
    if (threadIdx.x == 0)
    {
        mbarrierArriveExpectBytes(barrier, static_cast<std::uint32_t>(bytes + extra));
        tmaLoad2D(box, &map, x, y, barrier);
    }
    if (wait != 0)
    {
        mbarrierWait(barrier, 0);
    }
    for (int i = static_cast<int>(threadIdx.x); i < bytes; i += kWARPGROUP)
    {
        out[i] = shared[i];
    }
    mbarrierWait(barrier, 0);
}

// ---- wgmma on TMA -------------------------------------------------------------------------------------------------

enum class Bug : int
{
    kNONE,
    kNO_WAIT_FOR_DATA, //!< the product starts before the boxes have landed
    kREUSED_EARLY, //!< a stage is filled while a wgmma still reads it
    kREAD_BEFORE_WAIT, //!< the accumulators are read while the product is in flight
    kDESCRIPTOR, //!< B advances by half of what it should
    kPARITY, //!< the parity never changes
};

constexpr int kDEPTH = 64;
constexpr int kSTAGES = 2;

//! C[64, N] = A[64, K] B[N, K]^T: one block, one warpgroup, a ring of two stages.
template <int kN, Bug kBUG>
__global__ void __launch_bounds__(kWARPGROUP)
    productKernel(const __grid_constant__ CUtensorMap mapA, const __grid_constant__ CUtensorMap mapB, int k, float* c)
{
    constexpr std::uint32_t kA_BYTES = 64 * kDEPTH * 2;
    constexpr std::uint32_t kB_BYTES = kN * kDEPTH * 2;
    constexpr std::uint32_t kSTAGE_BYTES = kA_BYTES + kB_BYTES;
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    std::uint32_t const base = sharedAddress(shared);
    std::uint32_t const barriers = base + kSTAGES * kSTAGE_BYTES;
    int const numSteps = k / kDEPTH;
    bool const leader = threadIdx.x == 0;
    auto const load = [&](int step)
    {
        if (leader && step < numSteps)
        {
            std::uint32_t const stage = base + static_cast<std::uint32_t>(step % kSTAGES) * kSTAGE_BYTES;
            std::uint32_t const barrier = barriers + static_cast<std::uint32_t>(step % kSTAGES) * 8;
            mbarrierArriveExpectBytes(barrier, kSTAGE_BYTES);
            tmaLoad2D(stage, &mapA, step * kDEPTH, 0, barrier);
            tmaLoad2D(stage + kA_BYTES, &mapB, step * kDEPTH, 0, barrier);
        }
    };
    if (leader)
    {
        for (std::uint32_t stage = 0; stage < kSTAGES; ++stage)
        {
            mbarrierInit(barriers + stage * 8, 1);
        }
        fenceMbarrierInit();
    }
    __syncthreads();
    load(0);
    load(1);
    float d[kN / 2];
    for (float& value : d)
    {
        value = 1.F; // added to nothing: the first product does not read it
    }
    for (int step = 0; step < numSteps; ++step)
    {
        std::uint32_t const stage = base + static_cast<std::uint32_t>(step % kSTAGES) * kSTAGE_BYTES;
        int const round = kBUG == Bug::kPARITY ? 0 : step / kSTAGES % 2;
        if (kBUG != Bug::kNO_WAIT_FOR_DATA)
        {
            mbarrierWait(barriers + static_cast<std::uint32_t>(step % kSTAGES) * 8, static_cast<std::uint32_t>(round));
        }
        wgmmaFence();
#pragma unroll
        for (std::uint32_t i = 0; i < kDEPTH / 16; ++i)
        {
            constexpr std::uint32_t kB_STEP = kBUG == Bug::kDESCRIPTOR ? 16 : 32;
            wgmmaBf16(
                d, wgmmaDescriptor(stage + i * 32), wgmmaDescriptor(stage + kA_BYTES + i * kB_STEP), step > 0 || i > 0);
        }
        wgmmaCommit();
        if (kBUG == Bug::kREUSED_EARLY)
        {
            __syncthreads();
            load(step + kSTAGES);
        }
        if (kBUG != Bug::kREAD_BEFORE_WAIT || step + 1 < numSteps)
        {
            wgmmaWait<0>();
        }
        if (kBUG != Bug::kREUSED_EARLY)
        {
            __syncthreads(); // everyone is done with the stage
            load(step + kSTAGES);
        }
    }
    int const thread = static_cast<int>(threadIdx.x);
    for (int i = 0; i < kN / 2; ++i)
    {
        int const row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
        c[row * kN + i / 4 * 8 + thread % 4 * 2 + i % 2] = d[i];
    }
    wgmmaWait<0>();
}

template <int kN, Bug kBUG>
char const* run(CUtensorMap const& a, CUtensorMap const& b, int k, float* c)
{
    std::size_t const shared = kSTAGES * (64 + kN) * kDEPTH * 2 + kSTAGES * 8;
    return launchKernel(productKernel<kN, kBUG>, dim3(1), dim3(kWARPGROUP), shared, nullptr, a, b, k, c);
}

} // namespace hopper

//! A tensor of 2-byte elements, \p rows x \p columns.
extern "C" char const* runTma(void const* tensor, int rows, int columns, int boxRows, int boxColumns, int swizzle,
    int x, int y, int wait, int extra, unsigned char* out)
{
    CUtensorMap map;
    char const* const refused
        = hopper::describeRows(map, tensor, static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows),
            static_cast<std::uint32_t>(boxColumns), static_cast<std::uint32_t>(boxRows),
            static_cast<CUtensorMapSwizzle>(swizzle));
    if (refused != nullptr)
    {
        return refused;
    }
    int const bytes = boxRows * boxColumns * 2;
    return hopper::launchKernel(hopper::tmaKernel, dim3(1), dim3(hopper::kWARPGROUP),
        static_cast<std::size_t>(bytes) + 8, nullptr, map, x, y, bytes, wait, extra, out);
}

extern "C" char const* runProduct(int bug, int n, void const* a, void const* b, float* c, int k)
{
    using hopper::Bug;
    CUtensorMap mapA;
    CUtensorMap mapB;
    auto const inputs = static_cast<std::uint64_t>(k);
    auto const columns = static_cast<std::uint32_t>(n);
    char const* refused = hopper::describeRows(mapA, a, inputs, 64, hopper::kDEPTH, 64, CU_TENSOR_MAP_SWIZZLE_128B);
    refused = refused ? refused
                      : hopper::describeRows(
                            mapB, b, inputs, columns, hopper::kDEPTH, columns, CU_TENSOR_MAP_SWIZZLE_128B);
    if (refused != nullptr)
    {
        return refused;
    }
    if (n == 128)
    {
        return hopper::run<128, Bug::kNONE>(mapA, mapB, k, c);
    }
#if defined(TRTLLM_KVMAP_EMULATE) // hardware is asked for the right product only
    switch (static_cast<Bug>(bug))
    {
    case Bug::kNO_WAIT_FOR_DATA:
        return hopper::run<64, Bug::kNO_WAIT_FOR_DATA>(mapA, mapB, k, c);
    case Bug::kREUSED_EARLY:
        return hopper::run<64, Bug::kREUSED_EARLY>(mapA, mapB, k, c);
    case Bug::kREAD_BEFORE_WAIT:
        return hopper::run<64, Bug::kREAD_BEFORE_WAIT>(mapA, mapB, k, c);
    case Bug::kDESCRIPTOR:
        return hopper::run<64, Bug::kDESCRIPTOR>(mapA, mapB, k, c);
    case Bug::kPARITY:
        return hopper::run<64, Bug::kPARITY>(mapA, mapB, k, c);
    case Bug::kNONE:
        break;
    }
#endif
    return hopper::run<64, Bug::kNONE>(mapA, mapB, k, c);
}
