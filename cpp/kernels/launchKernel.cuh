#pragma once

// Launching a kernel, on a GPU and in the emulator.

#include "kernels/ptxPrimitives.cuh"

#include <cstddef>
#include <string>
#include <utility>

namespace trtllm_kvmap::kernels
{

#if !defined(TRTLLM_KVMAP_EMULATE)
//! Let \p kernel have \p sharedBytes of dynamic shared memory, also more than the 48 KiB that need no asking.
template <typename... Params>
cudaError_t allowShared(void (*kernel)(Params...), std::size_t sharedBytes)
{
    constexpr std::size_t kDEFAULT_LIMIT = 48 * 1024;
    return sharedBytes <= kDEFAULT_LIMIT
        ? cudaSuccess
        : cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
            static_cast<int>(sharedBytes));
}

//! How a kernel is launched in clusters of \p cluster neighbouring blocks. It stays where it is made, since config
//! points into it.
struct ClusterLaunch
{
    cudaLaunchAttribute attribute{};
    cudaLaunchConfig_t config{};

    ClusterLaunch(uint32_t cluster, dim3 grid, dim3 block, std::size_t sharedBytes, cudaStream_t stream)
    {
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = cluster;
        attribute.val.clusterDim.y = 1;
        attribute.val.clusterDim.z = 1;
        config.gridDim = grid;
        config.blockDim = block;
        config.dynamicSmemBytes = sharedBytes;
        config.stream = stream;
        config.attrs = &attribute;
        config.numAttrs = cluster > 1 ? 1 : 0; // older GPUs know none
    }

    ClusterLaunch(ClusterLaunch const&) = delete;
    ClusterLaunch& operator=(ClusterLaunch const&) = delete;
};
#endif

//! Launch \p kernel on \p stream with \p sharedBytes of dynamic shared memory, in clusters of \p cluster neighbouring
//! blocks. Returns nullptr, or a sentence that stays valid until this host thread launches again. Under the emulator
//! the kernel has ended when this returns, and the options are emulator::currentOptions().
template <typename... Params, typename... Arguments>
char const* launchClusters(void (*kernel)(Params...), uint32_t cluster, dim3 grid, dim3 block, std::size_t sharedBytes,
    cudaStream_t stream, Arguments&&... arguments)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    static_cast<void>(stream);
    static thread_local std::string tError;
    tError = emulator::launch(
        emulator::currentOptions(), kernel, grid, cluster, block, sharedBytes, std::forward<Arguments>(arguments)...)
                 .error;
    return tError.empty() ? nullptr : tError.c_str();
#else
    ClusterLaunch launch(cluster, grid, block, sharedBytes, stream);
    cudaError_t error = allowShared(kernel, sharedBytes);
    if (error == cudaSuccess)
    {
        error = cudaLaunchKernelEx(&launch.config, kernel, std::forward<Arguments>(arguments)...);
    }
    if (error == cudaSuccess)
    {
        return nullptr;
    }
    cudaGetLastError(); // told here, and not again to whoever checks a call of their own
    return cudaGetErrorString(error);
#endif
}

//! The same without clusters.
template <typename... Params, typename... Arguments>
char const* launchKernel(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t sharedBytes, cudaStream_t stream,
    Arguments&&... arguments)
{
    return launchClusters(kernel, 1, grid, block, sharedBytes, stream, std::forward<Arguments>(arguments)...);
}

} // namespace trtllm_kvmap::kernels
