// trtllm_kvmap::pack_map and workspace_size: done once for a map, on the host.
#include "checks.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

namespace trtllm_kvmap::bindings
{

namespace
{

constexpr size_t kShapeInts = 5;
constexpr size_t kGroupInts = 4;
constexpr size_t kSliceInts = 4;

ModelShape shapeOf(at::IntArrayRef ints, char const* what)
{
    TORCH_CHECK_VALUE(ints.size() == kShapeInts, what, "_shape has ", ints.size(),
        " numbers; [num_layers, num_kv_heads, head_dim, rotary_dim, interleaved] is needed.");
    auto const at = [&ints](size_t i) { return static_cast<int32_t>(ints[i]); };
    return ModelShape{at(0), at(1), at(2), at(3), at(4)};
}

// Reads `groups` from front to back; the vectors own what the specs point to.
class GroupReader
{
public:
    GroupReader(at::IntArrayRef ints, at::TensorList weights, at::TensorList biases, at::TensorList scales)
        : mInts(ints)
    {
        mHeads.reserve(weights.size());
        mSlices.reserve(weights.size());
        for (size_t i = 0; i < weights.size(); ++i)
        {
            readGroup(weights[i], biases[i], scales[i]);
        }
        TORCH_CHECK_VALUE(mNext == mInts.size(), "groups has ", mInts.size(), " numbers, of which ", weights.size(),
            " groups use ", mNext, "; give one weight and one bias for each group.");
    }

    std::vector<MapGroupSpec> const& specs() const
    {
        return mSpecs;
    }

private:
    int32_t take()
    {
        TORCH_CHECK_VALUE(mNext < mInts.size(), "groups ends after ", mInts.size(), " numbers, inside a group.");
        return static_cast<int32_t>(mInts[mNext++]);
    }

    // Key or value, source or target.
    template <typename Enum>
    Enum takeOneOfTwo()
    {
        int32_t const value = take();
        TORCH_CHECK_VALUE(value == 0 || value == 1, "groups has ", value, " at ", mNext - 1,
            ", where a field (key 0, value 1) or an origin (source 0, target 1) belongs.");
        return static_cast<Enum>(value);
    }

    // A count read from the list bounds what is read after it, before any of it is allocated.
    int32_t takeCount(size_t intsEach)
    {
        int32_t const count = take();
        TORCH_CHECK_VALUE(count >= 0 && count * intsEach <= mInts.size() - std::min(mNext, mInts.size()),
            "groups names ", count, " heads or slices where it has ", mInts.size() - mNext, " numbers left.");
        return count;
    }

    void readGroup(at::Tensor const& weight, at::Tensor const& bias, at::Tensor const& scale)
    {
        MapGroupSpec spec{};
        spec.field = takeOneOfTwo<Field>();
        spec.layer = take();
        spec.numHeads = takeCount(1);
        spec.numSlices = takeCount(kSliceInts);
        auto& heads = mHeads.emplace_back(spec.numHeads);
        for (auto& head : heads)
        {
            head = take();
        }
        auto& slices = mSlices.emplace_back(spec.numSlices);
        for (auto& slice : slices)
        {
            slice.origin = takeOneOfTwo<Origin>();
            slice.field = takeOneOfTwo<Field>();
            slice.layer = take();
            slice.head = take();
        }
        spec.heads = heads.data();
        spec.slices = slices.data();
        spec.weight = floats(weight, "weight");
        spec.bias = floats(bias, "bias");
        spec.scale = floats(scale, "scale");
        mSpecs.push_back(spec);
    }

    static float const* floats(at::Tensor const& tensor, char const* what)
    {
        TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous(),
            "A ", what, " is ", tensor.scalar_type(), " on ", tensor.device(),
            "; contiguous float32 on the CPU is needed.");
        return tensor.numel() ? tensor.const_data_ptr<float>() : nullptr;
    }

    at::IntArrayRef mInts;
    size_t mNext{0};
    std::vector<std::vector<int32_t>> mHeads;
    std::vector<std::vector<Slice>> mSlices;
    std::vector<MapGroupSpec> mSpecs;
};

// The sizes that packMap trusts its pointers to have.
void checkSizes(MapSpec const& spec, at::TensorList weights, at::TensorList biases, at::TensorList scales)
{
    for (int32_t i = 0; i < spec.numGroups; ++i)
    {
        auto const& group = spec.groups[i];
        int64_t rows = 0;
        for (int32_t s = 0; s < group.numSlices; ++s)
        {
            rows += group.slices[s].origin == Origin::kSOURCE ? spec.source.headDim : spec.target.headDim;
        }
        int64_t const columns = int64_t{group.numHeads} * spec.target.headDim;
        bool const copied = weights[i].numel() == 0 && biases[i].numel() == 0;
        bool const fits = weights[i].dim() == 2 && weights[i].size(0) == rows && weights[i].size(1) == columns
            && biases[i].dim() == 1 && biases[i].size(0) == columns;
        bool const scaled = scales[i].numel() == 0 || (scales[i].dim() == 1 && scales[i].size(0) == columns);
        TORCH_CHECK_VALUE(copied || fits, "Group ", i, " has a weight of ", weights[i].sizes(), " and a bias of ",
            biases[i].sizes(), "; it needs [", rows, ", ", columns, "] and [", columns,
            "], or two empty tensors for a copy.");
        TORCH_CHECK_VALUE(scaled, "Group ", i, " has a scale of ", scales[i].sizes(), "; it needs [", columns,
            "], or an empty tensor where all are 1.");
    }
}

// torch aligns CPU memory to 64 bytes, a packed map wants 256 wherever it lies.
at::Tensor emptyAligned(int64_t bytes)
{
    constexpr int64_t kAlignment = 256;
    at::Tensor const roomy = at::empty({bytes + kAlignment}, at::TensorOptions().dtype(at::kByte));
    auto const address = reinterpret_cast<uintptr_t>(roomy.const_data_ptr());
    return roomy.narrow(0, static_cast<int64_t>(-address % kAlignment), bytes);
}

std::tuple<at::Tensor, std::vector<int64_t>> packMapOp(at::IntArrayRef sourceShape, at::IntArrayRef targetShape,
    at::IntArrayRef groups, at::TensorList weights, at::TensorList biases, at::TensorList scales,
    at::ScalarType computeType, at::ScalarType weightType)
{
    TORCH_CHECK_VALUE(weights.size() == biases.size() && weights.size() == scales.size(), "There are ", weights.size(),
        " weights, ", biases.size(), " biases and ", scales.size(),
        " scales; one of each is needed for every group, empty for a copy.");
    GroupReader const reader(groups, weights, biases, scales);
    MapSpec spec{};
    spec.source = shapeOf(sourceShape, "source");
    spec.target = shapeOf(targetShape, "target");
    spec.computeType = dtypeOf(computeType, "The compute type");
    spec.weightType = dtypeOf(weightType, "The weights' type");
    spec.numGroups = static_cast<int32_t>(reader.specs().size());
    spec.groups = reader.specs().data();
    checkSizes(spec, weights, biases, scales);

    size_t bytes = 0;
    require(packedMapSize(spec, &bytes));
    at::Tensor blob = emptyAligned(static_cast<int64_t>(bytes));
    PackedMap map{};
    require(packMap(spec, blob.mutable_data_ptr(), bytes, &map));
    std::vector<int64_t> layout(kPackedMapInts);
    packedMapToInts(map, layout.data());
    return {blob, layout};
}

int64_t workspaceSizeOp(at::IntArrayRef layout, int64_t numTokens, int64_t chunkTokens, int64_t variant)
{
    TORCH_CHECK_VALUE(numTokens >= 0 && chunkTokens >= 0, "num_tokens is ", numTokens, " and chunk_tokens ",
        chunkTokens, "; neither may be negative.");
    return static_cast<int64_t>(workspaceSize(
        packedMapOf(layout), numTokens, static_cast<int32_t>(chunkTokens), static_cast<Variant>(variant)));
}

} // namespace

TORCH_LIBRARY_FRAGMENT(trtllm_kvmap, library)
{
    // shapes: [num_layers, num_kv_heads, head_dim, rotary_dim, interleaved]. groups, one after the other: field (key 0,
    // value 1), layer, number of heads, number of slices, the heads, and for each slice origin (source 0, target 1),
    // field, layer, head. weights float32 [sum of slice widths, heads * head_dim] and biases [heads * head_dim], both
    // empty for a copy; scales [heads * head_dim], factors of a weight's columns, empty where all are 1. weight_type:
    // the compute type, or float8_e4m3fn. Returns the packed map, uint8, and its layout.
    library.def("pack_map(int[] source_shape, int[] target_shape, int[] groups, Tensor[] weights, Tensor[] biases, "
                "Tensor[] scales, ScalarType compute_type, ScalarType weight_type) -> (Tensor, int[])",
        packMapOp);
    // Bytes that map_kv needs on a GPU.
    library.def("workspace_size(int[] layout, int num_tokens, int chunk_tokens, int variant) -> int", workspaceSizeOp);
}

} // namespace trtllm_kvmap::bindings
