// Lays a map out for the kernels: tables, tiles, and matrices in blocks (packedMap.h).

#include "kernels/numberFormats.h"
#include "kernels/packedMap.h"
#include "kernels/status.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <new>
#include <numeric>
#include <tuple>
#include <vector>

namespace trtllm_kvmap
{
namespace
{

constexpr int64_t kSectionAlignment = 256;

struct Tables
{
    std::vector<int32_t> order; // groups with a matrix, in the order they are packed
    std::vector<MapGroup> groups;
    std::vector<CopyHead> copies;
    std::vector<Slice> slices;
    std::vector<int32_t> sliceLists;
    std::vector<int32_t> headLists;
    std::vector<Tile> wideTiles;
    std::vector<Tile> narrowTiles;
    int64_t biasFloats = 0;
    int64_t weightElements = 0;
};

// The source's slices first; then those that are read together lie together.
struct SliceOrder
{
    bool operator()(Slice const& a, Slice const& b) const
    {
        return std::tie(a.origin, a.field, a.head, a.layer) < std::tie(b.origin, b.field, b.head, b.layer);
    }
};

using SlicePlaces = std::map<Slice, int32_t, SliceOrder>;

Status checkShape(char const* what, ModelShape const& s)
{
    if (s.numLayers < 1 || s.numLayers > kMaxLayers || s.numKvHeads < 1)
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT,
            "The %s has %d layers of %d KV heads; 1 to %d layers and at least one head are needed.", what, s.numLayers,
            s.numKvHeads, kMaxLayers);
    }
    if (s.headDim < 2 || s.headDim > kMaxHeadDim || s.headDim % 2)
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT, "The %s's head_dim is %d; it must be even and at most %d.",
            what, s.headDim, kMaxHeadDim);
    }
    if (s.rotaryDim < 0 || s.rotaryDim > s.headDim || s.rotaryDim % 2)
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT,
            "The %s's rotary_dim is %d; it must be even and at most its head_dim of %d.", what, s.rotaryDim, s.headDim);
    }
    return okStatus();
}

Status checkGroup(MapSpec const& spec, int32_t index)
{
    MapGroupSpec const& g = spec.groups[index];
    bool const known = g.field == Field::kKEY || g.field == Field::kVALUE;
    if (!known || g.layer < 0 || g.layer >= spec.target.numLayers || g.numHeads < 1 || !g.heads || g.numSlices < 1
        || !g.slices)
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT,
            "Group %d needs a field, a layer below %d, heads and slices; got layer %d, %d heads, %d slices.", index,
            spec.target.numLayers, g.layer, g.numHeads, g.numSlices);
    }
    for (int32_t i = 0; i < g.numHeads; ++i)
    {
        if (g.heads[i] < 0 || g.heads[i] >= spec.target.numKvHeads)
        {
            return makeStatus(StatusCode::kINVALID_ARGUMENT, "Group %d writes head %d; the target has %d.", index,
                g.heads[i], spec.target.numKvHeads);
        }
    }
    bool const copied = g.weight == nullptr;
    if (copied != (g.bias == nullptr) || (copied && g.numSlices != g.numHeads))
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT,
            "Group %d needs a matrix and a bias, or neither and one slice per head; it has %d slices for %d heads.",
            index, g.numSlices, g.numHeads);
    }
    if (copied && g.scale)
    {
        return makeStatus(
            StatusCode::kINVALID_ARGUMENT, "Group %d copies heads and has scales; they belong to a matrix.", index);
    }
    for (int32_t i = 0; i < g.numSlices; ++i)
    {
        Slice const& s = g.slices[i];
        ModelShape const& shape = s.origin == Origin::kSOURCE ? spec.source : spec.target;
        int32_t const layers = s.origin == Origin::kSOURCE ? shape.numLayers : 1;
        if (s.layer < 0 || s.layer >= layers || s.head < 0 || s.head >= shape.numKvHeads)
        {
            return makeStatus(StatusCode::kINVALID_ARGUMENT,
                "Group %d reads layer %d, head %d of the %s; there are %d layers of %d heads to read.", index, s.layer,
                s.head, s.origin == Origin::kSOURCE ? "source" : "target itself", layers, shape.numKvHeads);
        }
        if (copied && shape.headDim != spec.target.headDim)
        {
            return makeStatus(StatusCode::kINVALID_ARGUMENT,
                "Group %d copies heads of %d channels into heads of %d; a copy needs equal ones.", index,
                shape.headDim, spec.target.headDim);
        }
    }
    return okStatus();
}

Status checkSpec(MapSpec const& spec)
{
    Status status = checkShape("source", spec.source);
    if (isOk(status))
    {
        status = checkShape("target", spec.target);
    }
    if (isOk(status)
        && (!isKnown(spec.computeType) || spec.computeType == DType::kFP8_E4M3 || spec.numGroups < 0
            || (spec.numGroups && !spec.groups)))
    {
        status = makeStatus(StatusCode::kINVALID_ARGUMENT,
            "A map is packed in float32, float16 or bfloat16 and holds groups; got type %d and %d groups.",
            static_cast<int32_t>(spec.computeType), spec.numGroups);
    }
    if (isOk(status) && spec.weightType != spec.computeType && spec.weightType != DType::kFP8_E4M3)
    {
        status = makeStatus(StatusCode::kINVALID_ARGUMENT,
            "Weights are kept in the type of the products, %d, or in fp8-e4m3, %d; got type %d.",
            static_cast<int32_t>(spec.computeType), static_cast<int32_t>(DType::kFP8_E4M3),
            static_cast<int32_t>(spec.weightType));
    }
    for (int32_t i = 0; isOk(status) && i < spec.numGroups; ++i)
    {
        status = checkGroup(spec, i);
    }
    return status;
}

// A group's slices as the kernels read them: the source's first.
std::vector<int32_t> sliceOrder(MapGroupSpec const& group)
{
    std::vector<int32_t> order(group.numSlices);
    std::iota(order.begin(), order.end(), 0);
    std::stable_partition(
        order.begin(), order.end(), [&](int32_t i) { return group.slices[i].origin == Origin::kSOURCE; });
    return order;
}

int32_t widthOf(MapSpec const& spec, Slice const& s)
{
    return s.origin == Origin::kSOURCE ? spec.source.headDim : spec.target.headDim;
}

void addCopies(MapGroupSpec const& group, Tables& tables)
{
    bool const plain = std::all_of(group.slices, group.slices + group.numSlices,
        [&](Slice const& s) { return s.origin == Origin::kSOURCE && s.field == group.field; });
    for (int32_t i = 0; i < group.numHeads; ++i)
    {
        tables.copies.push_back({group.slices[i], group.field, group.layer, group.heads[i], plain});
    }
}

void addGroup(MapSpec const& spec, MapGroupSpec const& given, SlicePlaces const& places, Tables& tables)
{
    MapGroup group{};
    group.field = given.field;
    group.layer = given.layer;
    group.numHeads = given.numHeads;
    group.headList = static_cast<int32_t>(tables.headLists.size());
    group.sliceList = static_cast<int32_t>(tables.sliceLists.size());
    tables.headLists.insert(tables.headLists.end(), given.heads, given.heads + given.numHeads);
    for (int32_t i : sliceOrder(given))
    {
        Slice const& s = given.slices[i];
        tables.sliceLists.push_back(places.at(s));
        (s.origin == Origin::kSOURCE ? group.numSourceSlices : group.numOwnSlices)++;
    }
    int32_t const inputs
        = group.numSourceSlices * sliceWidth(spec.source) + group.numOwnSlices * sliceWidth(spec.target);
    int32_t const columns = given.numHeads * spec.target.headDim;
    int64_t const columnBlocks = roundUp(columns, kBlockColumns) / kBlockColumns;
    group.kBlocks = static_cast<int32_t>(roundUp(inputs, kBlockInputs) / kBlockInputs);
    group.bias = tables.biasFloats;
    group.weight = tables.weightElements;
    tables.biasFloats += columnBlocks * kBlockColumns;
    tables.weightElements += columnBlocks * group.kBlocks * kBlockElements;
    int32_t const number = static_cast<int32_t>(tables.groups.size());
    for (int32_t column = 0; column < columns; column += kBlockColumns)
    {
        tables.narrowTiles.push_back({number, column});
        if (column % kWideColumns == 0)
        {
            tables.wideTiles.push_back({number, column});
        }
    }
    tables.groups.push_back(group);
}

Tables makeTables(MapSpec const& spec)
{
    Tables tables;
    SlicePlaces places;
    for (int32_t i = 0; i < spec.numGroups; ++i)
    {
        MapGroupSpec const& group = spec.groups[i];
        if (!group.weight)
        {
            addCopies(group, tables);
            continue;
        }
        tables.order.push_back(i);
        for (int32_t j = 0; j < group.numSlices; ++j)
        {
            places.emplace(group.slices[j], 0);
        }
    }
    for (auto& [slice, place] : places)
    {
        place = static_cast<int32_t>(tables.slices.size());
        tables.slices.push_back(slice);
    }
    // Groups that begin with the same slice run one after another, while it is still in the L2 cache.
    std::stable_sort(tables.order.begin(), tables.order.end(),
        [&](int32_t a, int32_t b) { return SliceOrder{}(spec.groups[a].slices[0], spec.groups[b].slices[0]); });
    for (int32_t i : tables.order)
    {
        addGroup(spec, spec.groups[i], places, tables);
    }
    return tables;
}

// Slices and copies are the second dimension of a grid.
Status checkTables(Tables const& tables)
{
    constexpr size_t kMaxGridRows = 65535;
    if (tables.slices.size() > kMaxGridRows || tables.copies.size() > kMaxGridRows)
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT,
            "The map reads %zu slices and copies %zu heads; at most %zu of each are possible.", tables.slices.size(),
            tables.copies.size(), kMaxGridRows);
    }
    return okStatus();
}

PackedMap layOut(MapSpec const& spec, Tables const& tables)
{
    PackedMap map{};
    map.version = kPackedMapVersion;
    map.computeType = spec.computeType;
    map.weightType = spec.weightType;
    map.source = spec.source;
    map.target = spec.target;
    map.numGroups = static_cast<int32_t>(tables.groups.size());
    map.numCopies = static_cast<int32_t>(tables.copies.size());
    map.numSlices = static_cast<int32_t>(tables.slices.size());
    map.numWideTiles = static_cast<int32_t>(tables.wideTiles.size());
    map.numNarrowTiles = static_cast<int32_t>(tables.narrowTiles.size());
    for (Slice const& s : tables.slices)
    {
        (s.origin == Origin::kSOURCE ? map.numSourceSlices : map.readsTokenIds) += 1;
    }
    for (CopyHead const& c : tables.copies)
    {
        map.readsTokenIds += c.slice.origin == Origin::kTARGET;
    }
    map.readsTokenIds = map.readsTokenIds > 0;
    for (MapGroup const& g : tables.groups)
    {
        map.maxKBlocks = std::max(map.maxKBlocks, g.kBlocks);
    }
    auto const place = [&](int64_t bytes)
    {
        int64_t const offset = map.bytes;
        map.bytes += roundUp(bytes, kSectionAlignment);
        return offset;
    };
    auto const placeTable = [&](auto const& rows) { return place(rows.size() * sizeof rows[0]); };
    map.groups = placeTable(tables.groups);
    map.copies = placeTable(tables.copies);
    map.slices = placeTable(tables.slices);
    map.sliceLists = placeTable(tables.sliceLists);
    map.headLists = placeTable(tables.headLists);
    map.wideTiles = placeTable(tables.wideTiles);
    map.narrowTiles = placeTable(tables.narrowTiles);
    map.bias = place(tables.biasFloats * sizeof(float));
    map.scales = place(spec.weightType == DType::kFP8_E4M3 ? tables.biasFloats * sizeof(float) : 0);
    map.weights = place(tables.weightElements * sizeOf(spec.weightType));
    return map;
}

template <typename T>
void write(char* blob, int64_t offset, std::vector<T> const& rows)
{
    if (!rows.empty())
    {
        std::memcpy(blob + offset, rows.data(), rows.size() * sizeof(T));
    }
}

// Row after row: what neighbouring rows write shares cache lines, few enough to stay in the cache. The type is known to
// the compiler, which halves the time of a large map. False when a weight of fp8-e4m3 is no number: the kernels widen
// codes without looking.
template <DType dtype>
bool writeGroup(MapSpec const& spec, MapGroupSpec const& given, MapGroup const& group, PackedMap const& map, char* out)
{
    constexpr bool kKeepsScales = dtype == DType::kFP8_E4M3;
    int32_t const dim = spec.target.headDim;
    int32_t const turning = turningChannels(spec.target, group.field);
    int32_t const columns = given.numHeads * dim;
    auto* const bias = reinterpret_cast<float*>(out + map.bias) + group.bias;
    auto* const scales = reinterpret_cast<float*>(out + map.scales) + group.bias;
    std::vector<int32_t> columnOf(columns);     // packed column -> column of the matrix given
    std::vector<float> factorOf(columns, 1.0f); // what is multiplied into it here
    for (int32_t n = 0; n < columns; ++n)
    {
        columnOf[n] = n / dim * dim + channelOfColumn(n % dim, turning, spec.target.interleaved);
        bias[n] = given.bias[columnOf[n]];
        (kKeepsScales ? scales[n] : factorOf[n]) = given.scale ? given.scale[columnOf[n]] : 1.0f;
    }
    std::vector<float const*> firstRow; // of each slice given
    float const* row = given.weight;
    for (int32_t i = 0; i < given.numSlices; ++i)
    {
        firstRow.push_back(row);
        row += int64_t{widthOf(spec, given.slices[i])} * columns;
    }
    bool areNumbers = true;
    int32_t k = 0;
    for (int32_t i : sliceOrder(given))
    {
        row = firstRow[i];
        for (int32_t channel = 0; channel < widthOf(spec, given.slices[i]); ++channel, row += columns)
        {
            for (int32_t n = 0; n < columns; ++n)
            {
                float const weight = row[columnOf[n]] * factorOf[n];
                areNumbers = areNumbers && (!kKeepsScales || !std::isnan(weight));
                storeNumber(out + map.weights,
                    group.weight + weightIndex(n, k + channel, group.kBlocks, sizeOf(dtype)), dtype, weight);
            }
        }
        k += static_cast<int32_t>(roundUp(widthOf(spec, given.slices[i]), kSliceGranularity));
    }
    return areNumbers;
}

} // namespace

Status packedMapSize(MapSpec const& spec, size_t* bytes)
{
    if (!bytes)
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT, "packedMapSize needs a place for the size; got null.");
    }
    Status const status = checkSpec(spec);
    if (!isOk(status))
    {
        return status;
    }
    try
    {
        Tables const tables = makeTables(spec);
        *bytes = static_cast<size_t>(layOut(spec, tables).bytes);
        return checkTables(tables);
    }
    catch (std::bad_alloc const&)
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT, "No host memory for the tables of %d groups.", spec.numGroups);
    }
    return okStatus();
}

Status packMap(MapSpec const& spec, void* blob, size_t bytes, PackedMap* map)
{
    Status const status = checkSpec(spec);
    if (!isOk(status))
    {
        return status;
    }
    try
    {
        Tables const tables = makeTables(spec);
        Status const sized = checkTables(tables);
        if (!isOk(sized))
        {
            return sized;
        }
        PackedMap packed = layOut(spec, tables);
        if (!map || !blob || bytes < static_cast<size_t>(packed.bytes))
        {
            return makeStatus(StatusCode::kINVALID_ARGUMENT,
                "packMap needs a PackedMap and a buffer of %lld bytes; the buffer has %zu.",
                static_cast<long long>(packed.bytes), blob ? bytes : size_t{0});
        }
        char* const out = static_cast<char*>(blob);
        std::memset(out, 0, packed.bytes); // padding rows and columns are zeros
        write(out, packed.groups, tables.groups);
        write(out, packed.copies, tables.copies);
        write(out, packed.slices, tables.slices);
        write(out, packed.sliceLists, tables.sliceLists);
        write(out, packed.headLists, tables.headLists);
        write(out, packed.wideTiles, tables.wideTiles);
        write(out, packed.narrowTiles, tables.narrowTiles);
        auto* const writeMatrix = spec.weightType == DType::kFLOAT32 ? writeGroup<DType::kFLOAT32>
            : spec.weightType == DType::kFLOAT16                     ? writeGroup<DType::kFLOAT16>
            : spec.weightType == DType::kBFLOAT16                    ? writeGroup<DType::kBFLOAT16>
                                                                     : writeGroup<DType::kFP8_E4M3>;
        for (size_t i = 0; i < tables.groups.size(); ++i)
        {
            if (!writeMatrix(spec, spec.groups[tables.order[i]], tables.groups[i], packed, out))
            {
                return makeStatus(StatusCode::kINVALID_ARGUMENT,
                    "Group %d has a weight that is not a number; fp8-e4m3 keeps numbers only.", tables.order[i]);
            }
        }
        packed.blob = blob;
        *map = packed;
    }
    catch (std::bad_alloc const&)
    {
        return makeStatus(StatusCode::kINVALID_ARGUMENT, "No host memory for the tables of %d groups.", spec.numGroups);
    }
    return okStatus();
}

} // namespace trtllm_kvmap
