// Refusing: a Status with a sentence, and the way it reaches TensorRT's log.
#pragma once

#include <trtllm_kvmap/mapKvCache.h>

#include <NvInferRuntime.h>

namespace trtllm_kvmap::plugin
{

// StatusCode::kINVALID_ARGUMENT with a formatted sentence.
__attribute__((format(printf, 1, 2))) Status refuse(char const* format, ...);

// 0 when `status` is ok; else its sentence goes to the log of the engine that called, or to stderr when there is none,
// and the result is not 0: what TensorRT's plugin interfaces return.
int32_t report(Status const& status) noexcept;

// Where report finds the log; TensorRT gives it when it loads the library.
void setLogFinder(nvinfer1::ILoggerFinder* finder) noexcept;

} // namespace trtllm_kvmap::plugin
