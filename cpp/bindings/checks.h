// From torch tensors to the plain structs of mapKvCache.h, with a sentence for everything that does not fit.
#pragma once

#include <trtllm_kvmap/mapKvCache.h>
#include <trtllm_kvmap/packedMapInts.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace trtllm_kvmap::bindings
{

inline DType dtypeOf(at::ScalarType type, char const* what)
{
    switch (type)
    {
    case at::kFloat: return DType::kFLOAT32;
    case at::kHalf: return DType::kFLOAT16;
    case at::kBFloat16: return DType::kBFLOAT16;
    case at::kFloat8_e4m3fn: return DType::kFP8_E4M3;
    default:
        TORCH_CHECK_VALUE(false, what, " is of ", type, "; float32, float16, bfloat16 or float8_e4m3fn is needed.");
    }
}

inline PackedMap packedMapOf(at::IntArrayRef layout)
{
    PackedMap map;
    TORCH_CHECK_VALUE(packedMapFromInts(layout.data(), static_cast<int64_t>(layout.size()), &map),
        "The layout of the packed map has ", layout.size(), " integers, the first of them ",
        layout.empty() ? -1 : layout[0], "; this build needs ", kPackedMapInts, " of version ", kPackedMapVersion,
        ". Pack the map again with this build.");
    return map;
}

inline void require(Status const& status)
{
    TORCH_CHECK_VALUE(status.code != StatusCode::kINVALID_ARGUMENT, status.sentence);
    TORCH_CHECK_NOT_IMPLEMENTED(status.code != StatusCode::kUNSUPPORTED, status.sentence);
    TORCH_CHECK(status.code == StatusCode::kOK, status.sentence);
}

} // namespace trtllm_kvmap::bindings
