// trtllm_kvmap::map_kv: the map as a torch operator, on CPU and CUDA tensors, in place and without a copy.
//
// A pool comes as one view per layer and field, [num_blocks, num_kv_heads, tokens_per_block, head_dim] with any strides
// that all views share. What is checked here is what only torch knows (dtypes, devices, shapes, and on the CPU the
// values of the slots); the rest is mapKvCache's own validate.
#include "checks.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

namespace trtllm_kvmap::bindings
{

namespace
{

using OptionalTensor = std::optional<at::Tensor>;

PoolView viewPool(char const* what, at::TensorList keys, at::TensorList values, at::ArrayRef<double> scales,
    ModelShape const& shape, at::Device device)
{
    auto const layers = static_cast<size_t>(shape.numLayers);
    TORCH_CHECK_VALUE(keys.size() == layers && values.size() == layers && layers <= kMaxLayers, "The ", what,
        " pool has ", keys.size(), " key views and ", values.size(), " value views; the map needs ", layers,
        " of each, and at most ", kMaxLayers, ".");
    TORCH_CHECK_VALUE(
        scales.size() == 2, "The ", what, " pool has ", scales.size(), " scales; [key, value] is needed.");
    at::Tensor const& first = keys[0];
    PoolView pool{};
    for (at::TensorList views : {keys, values})
    {
        for (size_t layer = 0; layer < layers; ++layer)
        {
            at::Tensor const& view = views[layer];
            TORCH_CHECK_VALUE(view.device() == device, "A view of the ", what, " pool lies on ", view.device(),
                "; the call runs on ", device, ".");
            TORCH_CHECK_VALUE(view.dim() == 4 && view.size(1) == shape.numKvHeads && view.size(3) == shape.headDim,
                "A view of the ", what, " pool has shape ", view.sizes(), "; [num_blocks, ", shape.numKvHeads,
                ", tokens_per_block, ", shape.headDim, "] is needed.");
            TORCH_CHECK_VALUE(view.sizes() == first.sizes() && view.strides() == first.strides()
                    && view.scalar_type() == first.scalar_type(),
                "The views of the ", what, " pool differ: ", view.scalar_type(), " ", view.sizes(), " with strides ",
                view.strides(), " beside ", first.scalar_type(), " ", first.sizes(), " with strides ", first.strides(),
                "; one shape, one dtype and one set of strides is needed.");
        }
    }
    pool.blockStride = first.stride(0);
    pool.headStride = first.stride(1);
    pool.tokenStride = first.stride(2);
    pool.channelStride = first.stride(3);
    pool.numBlocks = static_cast<int32_t>(first.size(0));
    pool.numLayers = shape.numLayers;
    pool.numKvHeads = shape.numKvHeads;
    pool.tokensPerBlock = static_cast<int32_t>(first.size(2));
    pool.headDim = shape.headDim;
    pool.dtype = dtypeOf(first.scalar_type(), what);
    for (size_t field = 0; field < 2; ++field)
    {
        pool.scale[field] = static_cast<float>(scales[field]);
    }
    return pool;
}

// Only where there is data: a fake tensor has a shape and no address.
void pointPool(PoolView& pool, at::TensorList keys, at::TensorList values, bool written)
{
    for (size_t layer = 0; layer < keys.size(); ++layer)
    {
        for (size_t field = 0; field < 2; ++field)
        {
            at::Tensor const& view = field == 0 ? keys[layer] : values[layer];
            pool.layers[field][layer] = written ? view.mutable_data_ptr() : const_cast<void*>(view.const_data_ptr());
        }
    }
}

void checkIndices(char const* what, at::Tensor const& indices, at::Tensor const& positions, at::Device device)
{
    bool const known = indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt;
    TORCH_CHECK_VALUE(known && indices.scalar_type() == positions.scalar_type() && indices.dim() == 1
            && indices.size(0) == positions.size(0) && indices.is_contiguous() && indices.device() == device,
        what, " is ", indices.scalar_type(), " ", indices.sizes(), " on ", indices.device(),
        "; contiguous int64 or int32 [", positions.dim() == 1 ? positions.size(0) : -1, "] on ", device,
        " is needed, of one dtype for all indices.");
}

void checkRope(char const* what, at::Tensor const& table, ModelShape const& shape, at::Device device)
{
    TORCH_CHECK_VALUE(table.scalar_type() == at::kFloat && table.dim() == 3 && table.size(0) == 2
            && table.size(2) == shape.rotaryDim / 2 && table.is_contiguous() && table.device() == device,
        what, " is ", table.scalar_type(), " ", table.sizes(), " on ", table.device(),
        "; contiguous float32 [2 (cos, sin), num_positions, ", shape.rotaryDim / 2, "] on ", device, " is needed.");
}

RopeTable ropeOf(at::Tensor const& table, double scale)
{
    float const* const cos = table.const_data_ptr<float>();
    return RopeTable{cos, cos + table.size(1) * table.size(2), table.size(1), static_cast<float>(scale)};
}

void checkTokenTable(OptionalTensor const& keys, OptionalTensor const& values, OptionalTensor const& tokenIds,
    PackedMap const& map, at::Device device)
{
    if (!map.readsTokenIds)
    {
        return;
    }
    TORCH_CHECK_VALUE(keys && values && tokenIds,
        "The map reads the target's own layer 0: token_ids, token_table_keys and token_table_values are needed.");
    for (at::Tensor const& table : {*keys, *values})
    {
        TORCH_CHECK_VALUE(table.dim() == 3 && table.size(1) == map.target.numKvHeads
                && table.size(2) == map.target.headDim && table.is_contiguous() && table.device() == device
                && table.sizes() == keys->sizes() && table.scalar_type() == keys->scalar_type(),
            "A token table is ", table.scalar_type(), " ", table.sizes(), " on ", table.device(),
            "; contiguous [vocab_size, ", map.target.numKvHeads, ", ", map.target.headDim, "] on ", device,
            " is needed, alike for keys and values.");
    }
}

// Values can be looked at only where they lie in host memory.
template <typename Index>
void checkRange(char const* what, at::Tensor const& indices, int64_t lowest, int64_t limit)
{
    auto const* const data = indices.const_data_ptr<Index>();
    for (int64_t i = 0; i < indices.numel(); ++i)
    {
        TORCH_CHECK_VALUE(data[i] >= lowest && data[i] < limit, what, " names ", data[i], " at ", i, "; ", lowest,
            " to ", limit - 1, " is there.");
    }
}

void checkRanges(char const* what, at::Tensor const& indices, int64_t lowest, int64_t limit)
{
    if (indices.scalar_type() == at::kLong)
    {
        checkRange<int64_t>(what, indices, lowest, limit);
    }
    else
    {
        checkRange<int32_t>(what, indices, lowest, limit);
    }
}

// One call, checked as far as shapes go. `point` fills in the addresses.
struct Call
{
    at::Tensor const& blob;
    at::TensorList sourceKeys, sourceValues, targetKeys, targetValues;
    at::Tensor const &sourceSlots, &targetSlots, &positions;
    OptionalTensor const& tokenIds;
    at::Tensor const &sourceRope, &targetRope;
    double sourceRopeScale, targetRopeScale;
    OptionalTensor const &tableKeys, &tableValues;
    at::Tensor const& workspace;
    MapParams params;

    void check(at::IntArrayRef layout, at::ArrayRef<double> scales)
    {
        TORCH_CHECK_VALUE(!targetKeys.empty(), "The target pool has no views; one per layer is needed.");
        at::Device const device = targetKeys[0].device();
        PackedMap& map = params.map;
        map = packedMapOf(layout);
        TORCH_CHECK_VALUE(blob.scalar_type() == at::kByte && blob.dim() == 1 && blob.numel() == map.bytes
                && blob.is_contiguous() && blob.device() == device,
            "The packed map is ", blob.scalar_type(), " ", blob.sizes(), " on ", blob.device(), "; contiguous uint8 [",
            map.bytes, "] on ", device, " is needed, as pack_map made it.");
        TORCH_CHECK_VALUE(scales.size() == 4, "scales has ", scales.size(),
            " numbers; [source key, source value, target key, target value] is needed.");
        params.source = viewPool("source", sourceKeys, sourceValues, scales.slice(0, 2), map.source, device);
        params.target = viewPool("target", targetKeys, targetValues, scales.slice(2, 2), map.target, device);
        checkIndices("positions", positions, positions, device);
        checkIndices("source_slots", sourceSlots, positions, device);
        checkIndices("target_slots", targetSlots, positions, device);
        if (tokenIds)
        {
            checkIndices("token_ids", *tokenIds, positions, device);
        }
        checkRope("source_rope", sourceRope, map.source, device);
        checkRope("target_rope", targetRope, map.target, device);
        checkTokenTable(tableKeys, tableValues, tokenIds, map, device);
        TORCH_CHECK_VALUE(
            workspace.scalar_type() == at::kByte && workspace.is_contiguous() && workspace.device() == device,
            "workspace is ", workspace.scalar_type(), " on ", workspace.device(), "; contiguous uint8 on ", device,
            " is needed.");
    }

    void checkValues() const
    {
        auto const slotsOf = [](PoolView const& pool) { return int64_t{pool.numBlocks} * pool.tokensPerBlock; };
        checkRanges("source_slots", sourceSlots, -1, slotsOf(params.source));
        checkRanges("target_slots", targetSlots, -1, slotsOf(params.target));
        checkRanges("positions", positions, 0, std::min(sourceRope.size(1), targetRope.size(1)));
        if (params.map.readsTokenIds)
        {
            checkRanges("token_ids", *tokenIds, 0, tableKeys->size(0));
        }
    }

    void point()
    {
        params.map.blob = blob.const_data_ptr();
        pointPool(params.source, sourceKeys, sourceValues, false);
        pointPool(params.target, targetKeys, targetValues, true);
        params.span.sourceSlots = sourceSlots.const_data_ptr();
        params.span.targetSlots = targetSlots.const_data_ptr();
        params.span.positions = positions.const_data_ptr();
        params.span.tokenIds = tokenIds ? tokenIds->const_data_ptr() : nullptr;
        params.span.numTokens = positions.size(0);
        params.span.indexType = positions.scalar_type() == at::kLong ? IndexType::kINT64 : IndexType::kINT32;
        params.sourceRope = ropeOf(sourceRope, sourceRopeScale);
        params.targetRope = ropeOf(targetRope, targetRopeScale);
        if (params.map.readsTokenIds)
        {
            params.tokenTable = TokenTable{{tableKeys->const_data_ptr(), tableValues->const_data_ptr()},
                tableKeys->size(0), dtypeOf(tableKeys->scalar_type(), "The token table")};
        }
        params.workspace = workspace.numel() ? workspace.mutable_data_ptr() : nullptr;
        params.workspaceBytes = static_cast<size_t>(workspace.numel());
    }
};

enum class Place
{
    kCPU,
    kCUDA,
    kNOWHERE, // fake tensors: check the shapes, touch nothing
};

Status launch([[maybe_unused]] MapParams const& params, at::Device device)
{
#ifdef TRTLLM_KVMAP_WITH_CUDA
    // Through torch's device interface, which needs no CUDA library of torch to link.
    c10::DeviceGuard const guard(device);
    auto const stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    return mapKvCache(params, static_cast<Stream>(stream.native_handle()));
#else
    TORCH_CHECK_NOT_IMPLEMENTED(false, "This build has no CUDA kernels, and the pools lie on ", device,
        ". Build with nvcc on PATH: python build_scripts/build_native.py.");
#endif
}

template <Place place>
void mapKvOp(at::Tensor const& packedMap, at::IntArrayRef layout, at::TensorList sourceKeys,
    at::TensorList sourceValues, at::TensorList targetKeys, at::TensorList targetValues, at::ArrayRef<double> scales,
    at::Tensor const& sourceSlots, at::Tensor const& targetSlots, at::Tensor const& positions,
    OptionalTensor const& tokenIds, at::Tensor const& sourceRope, at::Tensor const& targetRope, double sourceRopeScale,
    double targetRopeScale, bool sameRotation, OptionalTensor const& tableKeys, OptionalTensor const& tableValues,
    at::Tensor const& workspace, int64_t chunkTokens, int64_t variant)
{
    Call call{packedMap, sourceKeys, sourceValues, targetKeys, targetValues, sourceSlots, targetSlots, positions,
        tokenIds, sourceRope, targetRope, sourceRopeScale, targetRopeScale, tableKeys, tableValues, workspace,
        MapParams{}};
    call.params.sameRotation = sameRotation ? 1 : 0;
    call.params.variant = static_cast<Variant>(variant);
    call.params.chunkTokens = static_cast<int32_t>(chunkTokens);
    call.check(layout, scales);
    if constexpr (place == Place::kCPU)
    {
        call.checkValues();
        call.point();
        require(mapKvCacheCpu(call.params));
    }
    else if constexpr (place == Place::kCUDA)
    {
        call.point();
        require(launch(call.params, targetKeys[0].device()));
    }
}

} // namespace

TORCH_LIBRARY(trtllm_kvmap, library)
{
    // packed_map and layout: of pack_map, the map moved to the pools' device. scales: source key, source value, target
    // key, target value (1 except for fp8). Slots and positions [num_tokens], int64 or int32, -1 skips. Rope tables
    // float32 [2 (cos, sin), num_positions, rotary_dim / 2]. workspace: uint8, workspace_size bytes on a GPU, none on
    // the CPU. variant: 0 lets the kernels choose.
    library.def("map_kv(Tensor packed_map, int[] layout, Tensor[] source_keys, Tensor[] source_values, "
                "Tensor(a!)[] target_keys, Tensor(b!)[] target_values, float[] scales, Tensor source_slots, "
                "Tensor target_slots, Tensor positions, Tensor? token_ids, Tensor source_rope, Tensor target_rope, "
                "float source_rope_scale, float target_rope_scale, bool same_rotation, Tensor? token_table_keys, "
                "Tensor? token_table_values, Tensor(c!) workspace, int chunk_tokens=0, int variant=0) -> ()");
}

TORCH_LIBRARY_IMPL(trtllm_kvmap, CPU, library)
{
    library.impl("map_kv", mapKvOp<Place::kCPU>);
}

TORCH_LIBRARY_IMPL(trtllm_kvmap, CUDA, library)
{
    library.impl("map_kv", mapKvOp<Place::kCUDA>);
}

TORCH_LIBRARY_IMPL(trtllm_kvmap, Meta, library)
{
    library.impl("map_kv", mapKvOp<Place::kNOWHERE>);
}

} // namespace trtllm_kvmap::bindings
