// A kernel of clusters that share what they copy, called from Python through a C function, and mistakes in it.

#include "kernels/launchKernel.cuh"
#include "kernels/ptxHopper.cuh"
#include "kernels/tensorMaps.cuh"

namespace cluster
{

using namespace trtllm_kvmap::kernels;

enum class Bug : int
{
    kNONE,
    kNO_REMOTE_ARRIVAL, //!< only the own block is told that a stage has been read
    kOWN_COUNT, //!< a stage is taken for empty when the own block has read it
    kWRONG_RANK, //!< the arrival meant for another block goes to the own one
    kOWN_MASK, //!< copies go to the own block alone
    kWIDE_MASK, //!< copies also go to a block that is not there
    kBYTES, //!< the bytes of other blocks are not waited for
    kNO_BARRIER_BEFORE, //!< others' mbarriers are used before they are known to be there
    kNO_BARRIER_AFTER, //!< a block ends while others still arrive there
};

constexpr int kTHREADS = 128;
constexpr int kSTAGES = 2;
constexpr int kROWS = 16; //!< of a box
constexpr int kCOLUMNS = 64; //!< of a box and of the tensor, 2 bytes each
constexpr std::uint32_t kBOX_BYTES = kROWS * kCOLUMNS * 2;

//! In every step each block of a cluster copies one box to all of them. \p out [block][step][rank][box]: what each block
//! finds in its shared memory. \p ranks [block].
template <int kBLOCKS, Bug kBUG>
__global__ void __launch_bounds__(kTHREADS) multicastKernel(
    const __grid_constant__ CUtensorMap map, int numSteps, unsigned char* out, int* ranks)
{
    constexpr std::uint32_t kSTAGE_BYTES = kBLOCKS * kBOX_BYTES;
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    std::uint32_t const base = sharedAddress(shared);
    std::uint32_t const full = base + kSTAGES * kSTAGE_BYTES;
    std::uint32_t const empty = full + kSTAGES * 8;
    int const rank = static_cast<int>(clusterRank());
    bool const leader = threadIdx.x == 0;
    if (leader)
    {
        for (std::uint32_t stage = 0; stage < kSTAGES; ++stage)
        {
            mbarrierInit(full + stage * 8, 1);
            mbarrierInit(empty + stage * 8, kBUG == Bug::kOWN_COUNT ? 1 : kBLOCKS);
        }
        fenceMbarrierInit();
        ranks[blockIdx.x] = rank;
    }
    if (kBUG == Bug::kNO_BARRIER_BEFORE)
    {
        __syncthreads();
    }
    else
    {
        syncCluster();
    }
    auto const copy = [&](int step)
    {
        if (leader && step < numSteps)
        {
            std::uint32_t const stage = static_cast<std::uint32_t>(step % kSTAGES);
            std::uint32_t const parity = static_cast<std::uint32_t>(step / kSTAGES % 2);
            constexpr int kALL = (1 << kBLOCKS) - 1;
            int const blocks = kBUG == Bug::kOWN_MASK ? 1 << rank : kBUG == Bug::kWIDE_MASK ? kALL * 2 + 1 : kALL;
            mbarrierWait(empty + stage * 8, parity ^ 1);
            mbarrierArriveExpectBytes(full + stage * 8, kBUG == Bug::kBYTES ? kBOX_BYTES : kSTAGE_BYTES);
            tmaMulticast2D(base + stage * kSTAGE_BYTES + static_cast<std::uint32_t>(rank) * kBOX_BYTES, &map, 0,
                (step * kBLOCKS + rank) * kROWS, full + stage * 8, static_cast<std::uint16_t>(blocks));
        }
    };
    copy(0);
    for (int step = 0; step < numSteps; ++step)
    {
        copy(step + 1);
        std::uint32_t const stage = static_cast<std::uint32_t>(step % kSTAGES);
        mbarrierWait(full + stage * 8, static_cast<std::uint32_t>(step / kSTAGES % 2));
        unsigned char* const found = out + (static_cast<std::size_t>(blockIdx.x) * numSteps + step) * kSTAGE_BYTES;
        for (std::uint32_t i = threadIdx.x; i < kSTAGE_BYTES; i += kTHREADS)
        {
            found[i] = shared[stage * kSTAGE_BYTES + i];
        }
        fenceProxyAsync();
        __syncthreads(); // all threads have read the stage
        if (leader)
        {
            mbarrierArrive(empty + stage * 8);
            bool const tells = kBUG != Bug::kNO_REMOTE_ARRIVAL && kBUG != Bug::kOWN_COUNT;
            for (int other = 0; other < kBLOCKS && tells; ++other)
            {
                if (other != rank)
                {
                    int const to = kBUG == Bug::kWRONG_RANK ? rank : other;
                    mbarrierArriveCluster(mapShared(empty + stage * 8, static_cast<std::uint32_t>(to)));
                }
            }
        }
    }
    if (kBUG != Bug::kNO_BARRIER_AFTER)
    {
        syncCluster();
    }
}

template <int kBLOCKS, Bug kBUG>
char const* run(CUtensorMap const& map, int clusters, int numSteps, unsigned char* out, int* ranks)
{
    std::size_t const shared = kSTAGES * (kBLOCKS * kBOX_BYTES + 2 * 8);
    return launchClusters(multicastKernel<kBLOCKS, kBUG>, kBLOCKS, dim3(static_cast<unsigned>(clusters * kBLOCKS)),
        dim3(kTHREADS), shared, nullptr, map, numSteps, out, ranks);
}

} // namespace cluster

//! \p bug: hardware is asked for none. \p tensor [steps * blocks * 16][64] of 2 bytes.
extern "C" char const* runMulticast(
    int bug, int blocks, int clusters, int numSteps, void const* tensor, int* ranks, unsigned char* out)
{
    using cluster::Bug;
    CUtensorMap map;
    char const* const refused
        = cluster::describeRows(map, tensor, cluster::kCOLUMNS, static_cast<std::uint64_t>(numSteps) * blocks * cluster::kROWS,
            cluster::kCOLUMNS, cluster::kROWS, CU_TENSOR_MAP_SWIZZLE_NONE);
    if (refused != nullptr)
    {
        return refused;
    }
    if (blocks == 4)
    {
        return cluster::run<4, Bug::kNONE>(map, clusters, numSteps, out, ranks);
    }
    switch (static_cast<Bug>(bug))
    {
    case Bug::kNO_REMOTE_ARRIVAL:
        return cluster::run<2, Bug::kNO_REMOTE_ARRIVAL>(map, clusters, numSteps, out, ranks);
    case Bug::kOWN_COUNT:
        return cluster::run<2, Bug::kOWN_COUNT>(map, clusters, numSteps, out, ranks);
    case Bug::kWRONG_RANK:
        return cluster::run<2, Bug::kWRONG_RANK>(map, clusters, numSteps, out, ranks);
    case Bug::kOWN_MASK:
        return cluster::run<2, Bug::kOWN_MASK>(map, clusters, numSteps, out, ranks);
    case Bug::kWIDE_MASK:
        return cluster::run<2, Bug::kWIDE_MASK>(map, clusters, numSteps, out, ranks);
    case Bug::kBYTES:
        return cluster::run<2, Bug::kBYTES>(map, clusters, numSteps, out, ranks);
    case Bug::kNO_BARRIER_BEFORE:
        return cluster::run<2, Bug::kNO_BARRIER_BEFORE>(map, clusters, numSteps, out, ranks);
    case Bug::kNO_BARRIER_AFTER:
        return cluster::run<2, Bug::kNO_BARRIER_AFTER>(map, clusters, numSteps, out, ranks);
    case Bug::kNONE:
        break;
    }
    return cluster::run<2, Bug::kNONE>(map, clusters, numSteps, out, ranks);
}
