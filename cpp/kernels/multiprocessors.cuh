// How many multiprocessors a persistent grid has to fill.
#pragma once

#include "kernels/ptxPrimitives.cuh"

namespace trtllm_kvmap::kernels
{

//! Of the current device; 0 when it cannot be asked. Under the emulator a few, so that blocks take several items each.
inline int32_t multiprocessorCount()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    return 3;
#else
    int device = 0;
    int count = 0;
    bool const asked = cudaGetDevice(&device) == cudaSuccess
        && cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    return asked ? count : 0;
#endif
}

} // namespace trtllm_kvmap::kernels
