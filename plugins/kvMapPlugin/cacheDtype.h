// Cache dtypes: their sizes and TensorRT's names for them.
#pragma once

#include <trtllm_kvmap/mapKvCache.h>

#include <NvInferRuntime.h>

namespace trtllm_kvmap::plugin
{

inline int64_t bytesOf(DType dtype)
{
    return dtype == DType::kFLOAT32 ? 4 : dtype == DType::kFP8_E4M3 ? 1 : 2;
}

inline nvinfer1::DataType dataTypeOf(DType dtype)
{
    switch (dtype)
    {
    case DType::kFLOAT16: return nvinfer1::DataType::kHALF;
    case DType::kBFLOAT16: return nvinfer1::DataType::kBF16;
    case DType::kFP8_E4M3: return nvinfer1::DataType::kFP8;
    case DType::kFLOAT32: break;
    }
    return nvinfer1::DataType::kFLOAT;
}

// Of the types a token table may have.
inline DType dtypeOf(nvinfer1::DataType type)
{
    switch (type)
    {
    case nvinfer1::DataType::kHALF: return DType::kFLOAT16;
    case nvinfer1::DataType::kBF16: return DType::kBFLOAT16;
    default: return DType::kFLOAT32;
    }
}

} // namespace trtllm_kvmap::plugin
