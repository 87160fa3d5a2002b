// The inputs and the output of a KvMap plugin: names, types and shapes, in one list that every interface reads.
#pragma once

#include "kvMapConfig.h"

namespace trtllm_kvmap::plugin
{

// Inputs of both modes.
constexpr int32_t kPACKED_MAP = 0; // int32 [bytes / 4]: PackedMap::blob
constexpr int32_t kSOURCE_ROPE = 1;
constexpr int32_t kTARGET_ROPE = 2;
constexpr int32_t kHOST_SPANS = 3;

// Paged: four inputs for each side, the source's first. kSIDE + side * kINPUTS_PER_SIDE + one of these.
constexpr int32_t kHOST_NUM_BLOCKS = 4;
constexpr int32_t kFIRST_SIDE = 5;
constexpr int32_t kINPUTS_PER_SIDE = 4;
constexpr int32_t kHOST_POOL_POINTERS = 0;
constexpr int32_t kHOST_POOL_MAPPING = 1;
constexpr int32_t kHOST_BLOCK_OFFSETS = 2;
constexpr int32_t kBLOCK_OFFSETS = 3;
constexpr int32_t kPAGED_INPUTS = kFIRST_SIDE + 2 * kINPUTS_PER_SIDE;

// Dense.
constexpr int32_t kSOURCE_KV = 4;
constexpr int32_t kDENSE_INPUTS = 5;

// After them, in both modes, when the map reads the target's own layer 0.
constexpr int32_t kTOKEN_INPUTS = 3;
constexpr int32_t kTOKEN_IDS = 0;
constexpr int32_t kTOKEN_TABLE_KEYS = 1;
constexpr int32_t kTOKEN_TABLE_VALUES = 2;

constexpr int32_t kMAX_PORTS = kPAGED_INPUTS + kTOKEN_INPUTS + 1;

constexpr int64_t kANY = -1;

struct Port
{
    char const* name;
    nvinfer1::DataType type;
    bool anyFloat; // float32, float16 or bfloat16 instead of `type`
    nvinfer1::Dims dims; // kANY where the engine decides
};

// The ports of one plugin: its inputs, then its output.
class Ports
{
public:
    Ports(KvMapConfig const& config, PackedMap const& map);

    int32_t numInputs() const
    {
        return mNumInputs;
    }

    // The first of the token inputs; numInputs() when there are none.
    int32_t firstTokenInput() const
    {
        return mFirstTokenInput;
    }

    Port const& operator[](int32_t index) const
    {
        return mPorts[index];
    }

    bool allowsType(int32_t index, nvinfer1::DataType type) const;

    // Refuses a count, a type or a shape that does not fit; a dimension of -1 is one the engine does not know yet.
    Status check(nvinfer1::PluginTensorDesc const* inputs, int32_t numInputs) const;

private:
    void add(char const* name, nvinfer1::DataType type, std::initializer_list<int64_t> dims, bool anyFloat = false);
    void addPaged(PackedMap const& map);
    void addDense(KvMapConfig const& config, PackedMap const& map);

    std::array<Port, kMAX_PORTS> mPorts{};
    int32_t mNumPorts{0};
    int32_t mNumInputs{0};
    int32_t mFirstTokenInput{0};
};

} // namespace trtllm_kvmap::plugin
