#include "callWorkspace.h"

#include <algorithm>

namespace trtllm_kvmap::plugin
{

namespace
{

constexpr int32_t kINDEX_ARRAYS = 3;

// Each array begins on a boundary that the map's workspace, after them, needs as well.
int64_t indexBytes(int64_t numTokens)
{
    constexpr int64_t kALIGNMENT = 256;
    int64_t const bytes = numTokens * static_cast<int64_t>(sizeof(int32_t));
    return (bytes + kALIGNMENT - 1) / kALIGNMENT * kALIGNMENT;
}

size_t mapBytes(KvMapConfig const& config, PackedMap const& map, int64_t numTokens)
{
    return workspaceSize(map, numTokens, config.chunkTokens, static_cast<Variant>(config.variant));
}

} // namespace

CallWorkspace layOutWorkspace(KvMapConfig const& config, PackedMap const& map, void* memory, int64_t numTokens)
{
    char* const base = static_cast<char*>(memory);
    int64_t const step = indexBytes(numTokens);
    auto const array = [&](int32_t number) { return reinterpret_cast<int32_t*>(base + number * step); };
    return CallWorkspace{array(0), array(1), array(2), base + kINDEX_ARRAYS * step, mapBytes(config, map, numTokens)};
}

size_t workspaceBytes(KvMapConfig const& config, PackedMap const& map, int64_t maxNumTokens)
{
    // A short call may take another kernel, and with it more memory, than a long one; past a chunk nothing grows.
    int64_t const chunk = config.chunkTokens > 0 ? config.chunkTokens : kDefaultChunkTokens;
    size_t largest = mapBytes(config, map, maxNumTokens);
    for (int64_t numTokens = 1; numTokens <= std::min(maxNumTokens, chunk); ++numTokens)
    {
        largest = std::max(largest, mapBytes(config, map, numTokens));
    }
    return kINDEX_ARRAYS * static_cast<size_t>(indexBytes(maxNumTokens)) + largest;
}

} // namespace trtllm_kvmap::plugin
