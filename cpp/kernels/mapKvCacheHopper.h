// The Hopper kernel's launch, in a file of its own: only it needs tensor maps and sm_90a.
#pragma once

#include "kernels/finishTile.cuh"

namespace trtllm_kvmap::kernels
{

//! Why this map cannot be multiplied by the Hopper kernel; null when it can.
char const* hopperRefusal(PackedMap const& map);

//! Multiply one chunk: GemmArgs as for the wide variant. Returns nullptr, or what went wrong.
char const* multiplyHopper(PackedMap const& map, GemmArgs const& args, Stream stream);

} // namespace trtllm_kvmap::kernels
