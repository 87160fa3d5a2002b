// A PackedMap without its blob, as the integers it consists of: how it travels through torch operators and inside
// TensorRT engines. The packed map's own version is the first of them.
#pragma once

#include <trtllm_kvmap/mapKvCache.h>

#include <type_traits>

namespace trtllm_kvmap
{

namespace detail
{

// The one list of a PackedMap's integers, in the order in which they travel.
template <typename Map, typename Visit>
void visitPackedMap(Map& map, Visit&& visit)
{
    visit(map.version);
    visit(map.computeType);
    visit(map.weightType);
    for (auto* shape : {&map.source, &map.target})
    {
        visit(shape->numLayers);
        visit(shape->numKvHeads);
        visit(shape->headDim);
        visit(shape->rotaryDim);
        visit(shape->interleaved);
    }
    visit(map.numGroups);
    visit(map.numCopies);
    visit(map.numSlices);
    visit(map.numSourceSlices);
    visit(map.numWideTiles);
    visit(map.numNarrowTiles);
    visit(map.maxKBlocks);
    visit(map.readsTokenIds);
    visit(map.groups);
    visit(map.copies);
    visit(map.slices);
    visit(map.sliceLists);
    visit(map.headLists);
    visit(map.wideTiles);
    visit(map.narrowTiles);
    visit(map.bias);
    visit(map.scales);
    visit(map.weights);
    visit(map.bytes);
}

} // namespace detail

constexpr int32_t kPackedMapInts = 32;

// ints [kPackedMapInts].
inline void packedMapToInts(PackedMap const& map, int64_t* ints)
{
    detail::visitPackedMap(map, [&ints](auto const& member) { *ints++ = static_cast<int64_t>(member); });
}

// False, with `map` untouched, when there are not kPackedMapInts of them or when they are of another version. The blob
// is left null: the caller says where it lies.
inline bool packedMapFromInts(int64_t const* ints, int64_t count, PackedMap* map)
{
    if (count != kPackedMapInts || ints[0] != kPackedMapVersion)
    {
        return false;
    }
    *map = PackedMap{};
    detail::visitPackedMap(
        *map, [&ints](auto& member) { member = static_cast<std::decay_t<decltype(member)>>(*ints++); });
    return true;
}

} // namespace trtllm_kvmap
