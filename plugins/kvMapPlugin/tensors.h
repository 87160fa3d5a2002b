// What TensorRT hands to one enqueue.
#pragma once

#include <NvInferRuntime.h>

namespace trtllm_kvmap::plugin
{

struct Tensors
{
    nvinfer1::PluginTensorDesc const* descs; // of the inputs
    void const* const* inputs;
    void* output;
    void* workspace;

    int64_t dim(int32_t input, int32_t axis) const
    {
        return descs[input].dims.d[axis];
    }

    template <typename T>
    T const* data(int32_t input) const
    {
        return static_cast<T const*>(inputs[input]);
    }
};

} // namespace trtllm_kvmap::plugin
