// The checks that stand before every call, on the host.
#pragma once

#include "trtllm_kvmap/mapKvCache.h"

namespace trtllm_kvmap
{

// All of validate but the workspace, which the CPU version does without.
Status checkCall(MapParams const& params);

} // namespace trtllm_kvmap
