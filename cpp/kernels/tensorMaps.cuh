// Describing matrices in global memory to the copy engine.
#pragma once

#include "kernels/ptxHopper.cuh"

namespace trtllm_kvmap::kernels
{

//! The tensor map of 16-bit numbers [rows][columns], contiguous, read in boxes of \p boxRows x \p boxColumns. Returns
//! nullptr, or what the driver said.
inline char const* describeRows(CUtensorMap& map, void const* base, uint64_t columns, uint64_t rows,
    uint32_t boxColumns, uint32_t boxRows, CUtensorMapSwizzle swizzle)
{
    uint64_t const sizes[2] = {columns, rows};
    uint64_t const strides[1] = {columns * 2};
    uint32_t const box[2] = {boxColumns, boxRows};
    void* const address = const_cast<void*>(base);
#if defined(TRTLLM_KVMAP_EMULATE)
    return emulator::encodeTensorMap(
        map, 2, 2, address, sizes, strides, box, static_cast<emulator::Swizzle>(swizzle)); // of the same values
#else
    // Through the runtime, so that nothing links to the driver.
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaError_t const asked
        = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (asked != cudaSuccess || found != cudaDriverEntryPointSuccess)
    {
        return "the driver has no cuTensorMapEncodeTiled";
    }
    uint32_t const steps[2] = {1, 1};
    CUresult const made = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(&map,
        CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, address, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return made == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the matrix or its boxes";
#endif
}

} // namespace trtllm_kvmap::kernels
