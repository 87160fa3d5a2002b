#include "kvMapConfig.h"

#include "sentence.h"

#include <cstring>

namespace trtllm_kvmap::plugin
{

namespace
{

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

struct FieldSpec
{
    char const* name;
    PluginFieldType type;
    int32_t length;
    size_t offset;
    size_t bytes;
};

#define KVMAP_FIELD(name, type, length, member)                                                                        \
    FieldSpec                                                                                                          \
    {                                                                                                                  \
        name, PluginFieldType::type, length, offsetof(KvMapConfig, member), sizeof(KvMapConfig::member)                \
    }

// The one list of fields; README.md and PluginConfig.yaml say what they mean.
constexpr FieldSpec kFIELDS[KvMapFields::kCOUNT] = {
    KVMAP_FIELD("fields_version", kINT32, 1, version),
    KVMAP_FIELD("mode", kINT32, 1, mode),
    KVMAP_FIELD("packed_map", kINT64, kPackedMapInts, packedMap),
    KVMAP_FIELD("cache_dtypes", kINT32, 2, cacheDtypes),
    KVMAP_FIELD("tokens_per_block", kINT32, 2, tokensPerBlock),
    KVMAP_FIELD("cache_scales", kFLOAT32, 4, cacheScales),
    KVMAP_FIELD("rope_scales", kFLOAT32, 2, ropeScales),
    KVMAP_FIELD("same_rotation", kINT32, 1, sameRotation),
    KVMAP_FIELD("max_num_tokens", kINT32, 1, maxNumTokens),
    KVMAP_FIELD("chunk_tokens", kINT32, 1, chunkTokens),
    KVMAP_FIELD("variant", kINT32, 1, variant),
};

#undef KVMAP_FIELD

bool isPowerOfTwo(int32_t value)
{
    return value > 0 && (value & (value - 1)) == 0;
}

bool isKnownType(int32_t dtype)
{
    return dtype >= static_cast<int32_t>(DType::kFLOAT32) && dtype <= static_cast<int32_t>(DType::kFP8_E4M3);
}

Status readField(PluginField const& field, KvMapConfig* config, bool* seen)
{
    for (int32_t i = 0; i < KvMapFields::kCOUNT; ++i)
    {
        FieldSpec const& spec = kFIELDS[i];
        if (std::strcmp(field.name, spec.name) != 0)
        {
            continue;
        }
        if (field.type != spec.type || field.length != spec.length || field.data == nullptr)
        {
            return refuse("Field %s is of type %d and length %d; type %d and length %d with data is needed.", spec.name,
                static_cast<int32_t>(field.type), field.length, static_cast<int32_t>(spec.type), spec.length);
        }
        std::memcpy(reinterpret_cast<char*>(config) + spec.offset, field.data, spec.bytes);
        seen[i] = true;
        return Status{};
    }
    return refuse("There is no field %s; the fields of KvMap are listed in plugins/kvMapPlugin/README.md.", field.name);
}

Status checkConfig(KvMapConfig const& config, PackedMap* map)
{
    if (config.version != kFieldsVersion)
    {
        return refuse("The fields are of version %d; this plugin reads version %d. Build the engine again.",
            config.version, kFieldsVersion);
    }
    if (!packedMapFromInts(config.packedMap, kPackedMapInts, map))
    {
        return refuse(
            "packed_map is of version %lld; this plugin reads version %d. Pack the map and build the engine again.",
            static_cast<long long>(config.packedMap[0]), kPackedMapVersion);
    }
    bool const paged = config.mode == static_cast<int32_t>(Mode::kPAGED);
    if (!paged && config.mode != static_cast<int32_t>(Mode::kDENSE))
    {
        return refuse("mode is %d; 0 (paged) or 1 (dense) is needed.", config.mode);
    }
    for (Side side : {kSOURCE_SIDE, kTARGET_SIDE})
    {
        char const* const what = side == kSOURCE_SIDE ? "source" : "target";
        ModelShape const& shape = side == kSOURCE_SIDE ? map->source : map->target;
        if (shape.numLayers < 1 || shape.numLayers > kMaxLayers || shape.numKvHeads < 1 || shape.headDim < 2
            || shape.headDim > kMaxHeadDim || shape.rotaryDim < 0 || shape.rotaryDim > shape.headDim)
        {
            return refuse("packed_map names a %s of %d layers, %d KV heads of %d channels; pack the map again.", what,
                shape.numLayers, shape.numKvHeads, shape.headDim);
        }
        if (!isKnownType(config.cacheDtypes[side]))
        {
            return refuse(
                "cache_dtypes of the %s is %d; 0 (float32), 1 (float16), 2 (bfloat16) or 3 (fp8-e4m3) is needed.", what,
                config.cacheDtypes[side]);
        }
        if (paged && !isPowerOfTwo(config.tokensPerBlock[side]))
        {
            return refuse(
                "tokens_per_block of the %s is %d; a power of two is needed.", what, config.tokensPerBlock[side]);
        }
    }
    for (float scale : {config.cacheScales[0], config.cacheScales[1], config.cacheScales[2], config.cacheScales[3],
             config.ropeScales[0], config.ropeScales[1]})
    {
        if (!(scale > 0.0F && scale < 1e30F))
        {
            return refuse("A scale is %g; every cache_scales and rope_scales must be positive and finite.", scale);
        }
    }
    if ((paged && config.maxNumTokens < 1) || config.chunkTokens < 0)
    {
        return refuse("max_num_tokens is %d and chunk_tokens %d; at least 1 token, and chunks not below 0, are needed.",
            config.maxNumTokens, config.chunkTokens);
    }
    if (config.variant < static_cast<int32_t>(Variant::kAUTO)
        || config.variant > static_cast<int32_t>(Variant::kSMALL_T))
    {
        return refuse(
            "variant is %d; 0 (auto) to %d is needed.", config.variant, static_cast<int32_t>(Variant::kSMALL_T));
    }
    return Status{};
}

} // namespace

KvMapFields::KvMapFields(KvMapConfig const* config)
    : mFields{}
    , mCollection{kCOUNT, mFields.data()}
{
    for (int32_t i = 0; i < kCOUNT; ++i)
    {
        void const* const data = config ? reinterpret_cast<char const*>(config) + kFIELDS[i].offset : nullptr;
        mFields[i] = PluginField(kFIELDS[i].name, data, kFIELDS[i].type, kFIELDS[i].length);
    }
}

KvMapFields::KvMapFields()
    : KvMapFields(nullptr)
{
}

Status readFields(nvinfer1::PluginFieldCollection const* fields, KvMapConfig* config, PackedMap* map)
{
    if (fields == nullptr)
    {
        return refuse("There are no fields; the fields of KvMap are listed in plugins/kvMapPlugin/README.md.");
    }
    *config = KvMapConfig{};
    bool seen[KvMapFields::kCOUNT] = {};
    for (int32_t i = 0; i < fields->nbFields; ++i)
    {
        Status const status = readField(fields->fields[i], config, seen);
        if (status.code != StatusCode::kOK)
        {
            return status;
        }
    }
    for (int32_t i = 0; i < KvMapFields::kCOUNT; ++i)
    {
        if (!seen[i])
        {
            return refuse(
                "Field %s is missing; KvMap needs all of its %d fields.", kFIELDS[i].name, KvMapFields::kCOUNT);
        }
    }
    return checkConfig(*config, map);
}

} // namespace trtllm_kvmap::plugin
