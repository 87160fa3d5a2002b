// Zeros in device memory.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace trtllm_kvmap::plugin
{

// Enqueues a kernel that clears `bytes`, a multiple of 4, at `memory`; returns null, or what went wrong.
char const* clearMemory(void* memory, int64_t bytes, CUstream_st* stream);

} // namespace trtllm_kvmap::plugin
