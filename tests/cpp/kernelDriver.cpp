// A C door to the native map for tests that come through ctypes. Structs pass as they are; kernelSizes lets the caller
// compare its own picture of them.
#include "trtllm_kvmap/mapKvCache.h"

#include "kernels/numberFormats.h"

#ifdef TRTLLM_KVMAP_EMULATE
#include "emulator/launch.h"
#endif

using namespace trtllm_kvmap;

extern "C"
{

void kernelSizes(int64_t (&sizes)[8])
{
    int64_t const all[8] = {sizeof(Status), sizeof(MapSpec), sizeof(MapGroupSpec), sizeof(PackedMap), sizeof(PoolView),
        sizeof(Span), sizeof(TokenTable), sizeof(MapParams)};
    for (int i = 0; i < 8; ++i)
    {
        sizes[i] = all[i];
    }
}

void kernelPackedMapSize(MapSpec const* spec, size_t* bytes, Status* status)
{
    *status = packedMapSize(*spec, bytes);
}

void kernelPackMap(MapSpec const* spec, void* blob, size_t bytes, PackedMap* map, Status* status)
{
    *status = packMap(*spec, blob, bytes, map);
}

size_t kernelWorkspaceSize(PackedMap const* map, int64_t numTokens, int32_t chunkTokens, int32_t variant)
{
    return workspaceSize(*map, numTokens, chunkTokens, static_cast<Variant>(variant));
}

void kernelValidate(MapParams const* params, Status* status)
{
    *status = validate(*params);
}

void kernelMapCpu(MapParams const* params, Status* status)
{
    *status = mapKvCacheCpu(*params);
}

// One number after the other to a narrow type and back.
void kernelRound(float const* numbers, int64_t count, int32_t dtype, void* stored, float* again)
{
    for (int64_t i = 0; i < count; ++i)
    {
        storeNumber(stored, i, static_cast<DType>(dtype), numbers[i]);
        again[i] = loadNumber(stored, i, static_cast<DType>(dtype));
    }
}

#ifdef TRTLLM_KVMAP_EMULATE
void kernelMap(MapParams const* params, Status* status)
{
    *status = mapKvCache(*params, nullptr);
}

void kernelOptions(int order, int asyncCopies, int path, uint64_t seed)
{
    emulator::Options& options = emulator::currentOptions();
    options.order = static_cast<emulator::ThreadOrder>(order);
    options.asyncCopies = static_cast<emulator::AsyncCopies>(asyncCopies);
    options.path = static_cast<emulator::KernelPath>(path);
    options.seed = seed;
}
#endif

} // extern "C"
