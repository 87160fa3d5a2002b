// The product on sm_90a: its tensor maps and its launch.

#include "kernels/groupedGemmHopper.cuh"
#include "kernels/launchKernel.cuh"
#include "kernels/mapKvCacheHopper.h"
#include "kernels/multiprocessors.cuh"
#include "kernels/tensorMaps.cuh"

namespace trtllm_kvmap::kernels
{

char const* hopperRefusal(PackedMap const& map)
{
    bool const ownSlices = map.numSlices > map.numSourceSlices;
    if (map.computeType != DType::kBFLOAT16)
    {
        return "the Hopper kernel multiplies in bfloat16; pack the map in it";
    }
    if (sliceWidth(map.source) % kBlockInputs != 0 || (ownSlices && sliceWidth(map.target) % kBlockInputs != 0))
    {
        return "the Hopper kernel needs head sizes that are multiples of 64";
    }
    return !isHopper() ? "the Hopper kernel needs a GPU of compute capability 9.0" : nullptr;
}

char const* multiplyHopper(PackedMap const& map, GemmArgs const& args, Stream stream)
{
    HopperArgs hopper{};
    hopper.gemm = args;
    uint64_t const packedRows = static_cast<uint64_t>(map.bytes - map.weights) / (kBlockInputs * 2);
    uint64_t const sourceRows = static_cast<uint64_t>(map.numSourceSlices) * args.chunkTokens;
    uint64_t const ownRows = static_cast<uint64_t>(map.numSlices - map.numSourceSlices) * args.chunkTokens;
    char const* error = describeRows(hopper.weights, args.weights, kBlockInputs, packedRows, kBlockInputs,
        kBlockColumns, CU_TENSOR_MAP_SWIZZLE_NONE);
    auto const describeInputs = [](CUtensorMap& inputs, void const* base, int32_t width, uint64_t rows)
    {
        return describeRows(
            inputs, base, width, rows, kBlockInputs, HopperShape::kBoxRows, CU_TENSOR_MAP_SWIZZLE_128B);
    };
    if (!error && sourceRows > 0)
    {
        error = describeInputs(hopper.source, args.source, args.sourceWidth, sourceRows);
    }
    if (!error && ownRows > 0)
    {
        error = describeInputs(hopper.own, args.own, args.ownWidth, ownRows);
    }
    int32_t const steps = numClusterSteps(args);
    int32_t const resident = residentClusters(
        groupedGemmHopper, kClusterBlocks, HopperShape::kThreads, HopperShape::kSharedBytes);
    int32_t const blocks = kClusterBlocks * (resident > 0 ? std::min(steps, resident) : steps);
    return error ? error
                 : launchClusters(groupedGemmHopper, kClusterBlocks, blocks, HopperShape::kThreads,
                     HopperShape::kSharedBytes, stream, hopper);
}

} // namespace trtllm_kvmap::kernels
