#include "clearMemory.h"

#include "kernels/launchKernel.cuh"

#include <algorithm>

namespace trtllm_kvmap::plugin
{

namespace
{

constexpr int32_t kTHREADS = 256;
constexpr int64_t kMAX_BLOCKS = 4096;

__global__ void clearMemoryKernel(uint32_t* words, int64_t numWords)
{
    int64_t const step = static_cast<int64_t>(gridDim.x) * kTHREADS;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kTHREADS + threadIdx.x; i < numWords; i += step)
    {
        words[i] = 0;
    }
}

} // namespace

char const* clearMemory(void* memory, int64_t bytes, CUstream_st* stream)
{
    int64_t const numWords = bytes / static_cast<int64_t>(sizeof(uint32_t));
    int64_t const blocks = std::min((numWords + kTHREADS - 1) / kTHREADS, kMAX_BLOCKS);
    return blocks == 0 ? nullptr
                       : kernels::launchKernel(clearMemoryKernel, dim3(static_cast<unsigned>(blocks)), dim3(kTHREADS),
                             0, stream, static_cast<uint32_t*>(memory), numWords);
}

} // namespace trtllm_kvmap::plugin
