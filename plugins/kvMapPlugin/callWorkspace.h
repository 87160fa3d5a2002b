// The workspace of one enqueue: the slots and positions of its tokens, then what the map itself needs.
#pragma once

#include "kvMapConfig.h"

namespace trtllm_kvmap::plugin
{

struct CallWorkspace
{
    int32_t* sourceSlots; // [numTokens] each
    int32_t* targetSlots;
    int32_t* positions;
    void* map;
    size_t mapBytes;
};

CallWorkspace layOutWorkspace(KvMapConfig const& config, PackedMap const& map, void* memory, int64_t numTokens);

// Bytes that suffice for every call of at most `maxNumTokens` tokens.
size_t workspaceBytes(KvMapConfig const& config, PackedMap const& map, int64_t maxNumTokens);

} // namespace trtllm_kvmap::plugin
