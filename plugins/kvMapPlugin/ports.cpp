#include "ports.h"

#include "cacheDtype.h"
#include "sentence.h"

#include <cstdio>

namespace trtllm_kvmap::plugin
{

using nvinfer1::DataType;
using nvinfer1::Dims;

namespace
{

// "[2, any, 64]" into `text`.
void print(Dims const& dims, char* text, size_t size)
{
    int used = std::snprintf(text, size, "[");
    for (int32_t i = 0; i < dims.nbDims && used < static_cast<int>(size) - 24; ++i)
    {
        char const* const comma = i ? ", " : "";
        used += dims.d[i] == kANY
            ? std::snprintf(text + used, size - used, "%sany", comma)
            : std::snprintf(text + used, size - used, "%s%lld", comma, static_cast<long long>(dims.d[i]));
    }
    std::snprintf(text + used, size - used, "]");
}

bool fits(Dims const& given, Dims const& wanted)
{
    bool same = given.nbDims == wanted.nbDims;
    for (int32_t i = 0; same && i < wanted.nbDims; ++i)
    {
        same = given.d[i] == wanted.d[i] || given.d[i] == kANY || wanted.d[i] == kANY;
    }
    return same;
}

} // namespace

Ports::Ports(KvMapConfig const& config, PackedMap const& map)
{
    add("packed_map", DataType::kINT32, {map.bytes / 4});
    add("source_rope", DataType::kFLOAT, {2, kANY, map.source.rotaryDim / 2});
    add("target_rope", DataType::kFLOAT, {2, kANY, map.target.rotaryDim / 2});
    add("host_spans", DataType::kINT32, {kANY, 2});
    bool const paged = config.mode == static_cast<int32_t>(Mode::kPAGED);
    if (paged)
    {
        addPaged(map);
    }
    else
    {
        addDense(config, map);
    }
    mFirstTokenInput = mNumPorts;
    if (map.readsTokenIds)
    {
        add("token_ids", DataType::kINT32, {kANY});
        add("token_table_keys", DataType::kFLOAT, {kANY, map.target.numKvHeads, map.target.headDim}, true);
        add("token_table_values", DataType::kFLOAT, {kANY, map.target.numKvHeads, map.target.headDim}, true);
    }
    mNumInputs = mNumPorts;
    if (paged)
    {
        add("mapped_lengths", DataType::kINT32, {kANY});
    }
    else
    {
        add("target_kv", dataTypeOf(static_cast<DType>(config.cacheDtypes[kTARGET_SIDE])),
            {kANY, map.target.numLayers, 2, map.target.numKvHeads, kANY, map.target.headDim});
    }
}

void Ports::addPaged(PackedMap const& map)
{
    add("host_num_blocks", DataType::kINT32, {2});
    add("host_source_kv_cache_pool_pointers", DataType::kINT64, {1, 2});
    add("host_source_kv_cache_pool_mapping", DataType::kINT32, {map.source.numLayers, 2});
    add("host_source_kv_cache_block_offsets", DataType::kINT32, {1, kANY, 2, kANY});
    add("source_kv_cache_block_offsets", DataType::kINT32, {1, kANY, 2, kANY});
    add("host_target_kv_cache_pool_pointers", DataType::kINT64, {1, 2});
    add("host_target_kv_cache_pool_mapping", DataType::kINT32, {map.target.numLayers, 2});
    add("host_target_kv_cache_block_offsets", DataType::kINT32, {1, kANY, 2, kANY});
    add("target_kv_cache_block_offsets", DataType::kINT32, {1, kANY, 2, kANY});
}

void Ports::addDense(KvMapConfig const& config, PackedMap const& map)
{
    add("source_kv", dataTypeOf(static_cast<DType>(config.cacheDtypes[kSOURCE_SIDE])),
        {kANY, map.source.numLayers, 2, map.source.numKvHeads, kANY, map.source.headDim});
}

void Ports::add(char const* name, DataType type, std::initializer_list<int64_t> dims, bool anyFloat)
{
    Port& port = mPorts[mNumPorts++];
    port.name = name;
    port.type = type;
    port.anyFloat = anyFloat;
    for (int64_t dim : dims)
    {
        port.dims.d[port.dims.nbDims++] = dim;
    }
}

bool Ports::allowsType(int32_t index, DataType type) const
{
    Port const& port = mPorts[index];
    return type == port.type || (port.anyFloat && (type == DataType::kHALF || type == DataType::kBF16));
}

Status Ports::check(nvinfer1::PluginTensorDesc const* inputs, int32_t numInputs) const
{
    if (numInputs != mNumInputs)
    {
        return refuse("There are %d inputs; this map needs %d, from %s to %s.", numInputs, mNumInputs, mPorts[0].name,
            mPorts[mNumInputs - 1].name);
    }
    for (int32_t i = 0; i < numInputs; ++i)
    {
        if (!allowsType(i, inputs[i].type))
        {
            return refuse("Input %s is of TensorRT's type %d; type %d is needed.", mPorts[i].name,
                static_cast<int32_t>(inputs[i].type), static_cast<int32_t>(mPorts[i].type));
        }
        if (!fits(inputs[i].dims, mPorts[i].dims))
        {
            char given[96];
            char wanted[96];
            print(inputs[i].dims, given, sizeof(given));
            print(mPorts[i].dims, wanted, sizeof(wanted));
            return refuse("Input %s has shape %s; %s is needed.", mPorts[i].name, given, wanted);
        }
    }
    return Status{};
}

} // namespace trtllm_kvmap::plugin
