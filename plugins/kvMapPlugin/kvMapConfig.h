// What a KvMap plugin is made of: the structure of its map, and how the two caches are stored. It travels as plugin
// fields, in a network definition as in a serialised engine; the map's matrices travel as the plugin's first input.
#pragma once

#include <trtllm_kvmap/mapKvCache.h>
#include <trtllm_kvmap/packedMapInts.h>

#include <NvInferRuntime.h>

#include <array>

namespace trtllm_kvmap::plugin
{

// Counts meanings of the fields. A plugin refuses fields of another version.
constexpr int32_t kFieldsVersion = 1;

enum class Mode : int32_t
{
    kPAGED = 0, // pools by address and block offsets, as TensorRT-LLM passes them; written in place
    kDENSE = 1, // a tensor in, a tensor out
};

enum Side : int32_t
{
    kSOURCE_SIDE = 0,
    kTARGET_SIDE = 1,
};

struct KvMapConfig
{
    int32_t version;
    int32_t mode;
    int64_t packedMap[kPackedMapInts];
    int32_t cacheDtypes[2]; // trtllm_kvmap::DType of source and target
    int32_t tokensPerBlock[2]; // paged only; powers of two
    float cacheScales[4]; // source key, source value, target key, target value: real = stored * scale
    float ropeScales[2]; // attention factors of source and target
    int32_t sameRotation; // 1 when both models rotate keys alike
    int32_t maxNumTokens; // paged only: most tokens that one enqueue maps
    int32_t chunkTokens; // 0: the kernels' own choice
    int32_t variant; // trtllm_kvmap::Variant
};

// The plugin fields of `config`, pointing into it: it must outlive them and stay where it is.
class KvMapFields
{
public:
    static constexpr int32_t kCOUNT = 11;

    explicit KvMapFields(KvMapConfig const* config);

    // Of names and types alone, for a creator.
    KvMapFields();

    KvMapFields(KvMapFields const&) = delete;
    KvMapFields& operator=(KvMapFields const&) = delete;

    nvinfer1::PluginFieldCollection const* collection() const
    {
        return &mCollection;
    }

private:
    std::array<nvinfer1::PluginField, kCOUNT> mFields;
    nvinfer1::PluginFieldCollection mCollection;
};

// Fills `config` and `map` from fields, in any order; names that are not known, missing, or of another type or length
// are refused, and so is a configuration that no kernel could run.
Status readFields(nvinfer1::PluginFieldCollection const* fields, KvMapConfig* config, PackedMap* map);

} // namespace trtllm_kvmap::plugin
