// What kernels must know of the device: how many multiprocessors a persistent grid has to fill, and which code it runs.
#pragma once

#include "kernels/launchKernel.cuh"

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

//! How many clusters of \p cluster blocks of \p kernel the current device runs at once: multiprocessors lie in groups,
//! and a cluster in one of them. 0 when it cannot be asked.
template <typename... Params>
int32_t residentClusters(void (*kernel)(Params...), int32_t cluster, int32_t threads, std::size_t sharedBytes)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    static_cast<void>(kernel);
    static_cast<void>(cluster);
    static_cast<void>(threads);
    static_cast<void>(sharedBytes);
    return 2;
#else
    ClusterLaunch launch(static_cast<uint32_t>(cluster), dim3(cluster), dim3(threads), sharedBytes, nullptr);
    int count = 0;
    bool const asked = allowShared(kernel, sharedBytes) == cudaSuccess
        && cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config) == cudaSuccess;
    if (!asked)
    {
        cudaGetLastError(); // 0 says it
    }
    return asked ? count : 0;
#endif
}

//! Whether the current device runs sm_90a code. The emulator does.
inline bool isHopper()
{
#if defined(TRTLLM_KVMAP_EMULATE)
    return true;
#else
    int device = 0;
    int major = 0;
    int minor = 0;
    return cudaGetDevice(&device) == cudaSuccess
        && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess
        && cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9
        && minor == 0;
#endif
}

} // namespace trtllm_kvmap::kernels
