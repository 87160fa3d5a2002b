#pragma once

// One way to launch a kernel, on a GPU and in the emulator.

#include "kernels/ptxPrimitives.cuh"

#include <cstddef>
#include <string>
#include <utility>

namespace trtllm_kvmap::kernels
{

//! Launch \p kernel on \p stream with \p sharedBytes of dynamic shared memory (the limit above 48 KiB is raised for
//! it). Returns nullptr, or a sentence that stays valid until this host thread launches again. Under the emulator the
//! kernel has ended when this returns, and the options are emulator::currentOptions().
template <typename... Params, typename... Arguments>
char const* launchKernel(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t sharedBytes, cudaStream_t stream,
    Arguments&&... arguments)
{
#if defined(TRTLLM_KVMAP_EMULATE)
    static_cast<void>(stream);
    static thread_local std::string tError;
    tError = emulator::launch(
        emulator::currentOptions(), kernel, grid, block, sharedBytes, std::forward<Arguments>(arguments)...)
                 .error;
    return tError.empty() ? nullptr : tError.c_str();
#else
    constexpr std::size_t kDEFAULT_LIMIT = 48 * 1024;
    if (sharedBytes > kDEFAULT_LIMIT)
    {
        cudaError_t const raised = cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel),
            cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sharedBytes));
        if (raised != cudaSuccess)
        {
            return cudaGetErrorString(raised);
        }
    }
    kernel<<<grid, block, sharedBytes, stream>>>(std::forward<Arguments>(arguments)...);
    cudaError_t const launched = cudaGetLastError();
    return launched == cudaSuccess ? nullptr : cudaGetErrorString(launched);
#endif
}

} // namespace trtllm_kvmap::kernels
