// Sizes of the number formats, for host and device code.
#pragma once

#include "trtllm_kvmap/mapKvCache.h"

#ifdef __CUDACC__
#define TRTLLM_KVMAP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TRTLLM_KVMAP_HOST_DEVICE inline
#endif

namespace trtllm_kvmap
{

TRTLLM_KVMAP_HOST_DEVICE constexpr int32_t sizeOf(DType dtype)
{
    return dtype == DType::kFLOAT32 ? 4 : dtype == DType::kFP8_E4M3 ? 1 : 2;
}

TRTLLM_KVMAP_HOST_DEVICE constexpr bool isKnown(DType dtype)
{
    return dtype >= DType::kFLOAT32 && dtype <= DType::kFP8_E4M3;
}

} // namespace trtllm_kvmap
