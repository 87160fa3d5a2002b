// What lies in a packed map's buffer, and the few index formulas that packer, kernels and CPU version agree on.
//
// A group's matrix is cut into blocks of 64 columns x 64 inputs, [column block][input block], each 64 rows (columns of
// the matrix) of 64 inputs. Inside a block the 16-byte chunk c of row r lies at chunk c ^ (r & 7): exactly what shared
// memory wants, so a block is copied as it is, and both ldmatrix and a 128-byte-swizzled wgmma descriptor read it
// without bank conflicts. Columns of key heads are ordered so that the two channels of a RoPE pair are neighbours: a
// pair then sits in one thread's accumulators whatever the head size and the pairing.
#pragma once

#include "kernels/dtype.h"

namespace trtllm_kvmap
{

constexpr int32_t kBlockColumns = 64;
constexpr int32_t kBlockInputs = 64;
constexpr int32_t kBlockElements = kBlockColumns * kBlockInputs;
constexpr int32_t kWideColumns = 128;
// Slices are padded to whole 16-byte chunks of a half-precision workspace.
constexpr int32_t kSliceGranularity = 8;

// Target heads of one layer and field that read the same slices, the source's first.
struct MapGroup
{
    Field field;
    int32_t layer;
    int32_t numHeads;
    int32_t headList;  // first entry in headLists
    int32_t sliceList; // first entry in sliceLists; entries are indices into slices
    int32_t numSourceSlices;
    int32_t numOwnSlices;
    int32_t kBlocks;
    int64_t bias;   // first float, packed column order, whole blocks
    int64_t weight; // first element
};

struct Tile
{
    int32_t group;
    int32_t column;
};

// One target head that is copied. `plain`: its group moves source keys to keys, or source values to values.
struct CopyHead
{
    Slice slice;
    Field field;
    int32_t layer;
    int32_t head;
    int32_t plain;
};

template <typename T>
TRTLLM_KVMAP_HOST_DEVICE T const* table(PackedMap const& map, int64_t offset)
{
    return reinterpret_cast<T const*>(static_cast<char const*>(map.blob) + offset);
}

TRTLLM_KVMAP_HOST_DEVICE constexpr int64_t roundUp(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

// Inputs per slice, padded.
TRTLLM_KVMAP_HOST_DEVICE constexpr int32_t sliceWidth(ModelShape const& shape)
{
    return (shape.headDim + kSliceGranularity - 1) / kSliceGranularity * kSliceGranularity;
}

// Where input i < 16 of a step lies among its 16 bytes in fp8-e4m3. A thread of an mma multiplies inputs 2q, 2q + 1,
// 2q + 8 and 2q + 9 of a column, so these are one 32-bit word, the first two its halves' upper bytes.
TRTLLM_KVMAP_HOST_DEVICE constexpr int32_t float8Place(int32_t i)
{
    return i % 8 / 2 * 4 + i % 2 * 2 + (i < 8 ? 1 : 0);
}

// Where input k of column n lies in a group's matrix, in elements of `elementBytes`. A row of fp8-e4m3 is 64 bytes, two
// rows pass all banks, and chunk c of row r lies at c ^ (r / 2 & 3).
TRTLLM_KVMAP_HOST_DEVICE int64_t weightIndex(int32_t n, int32_t k, int32_t kBlocks, int32_t elementBytes)
{
    int32_t const perChunk = 16 / elementBytes;
    int32_t const row = n % kBlockColumns;
    int32_t const input = k % kBlockInputs;
    int32_t const chunk = (input / perChunk) ^ (elementBytes == 1 ? row / 2 & 3 : row & 7);
    int32_t const inChunk = elementBytes == 1 ? float8Place(input % perChunk) : input % perChunk;
    int64_t const block = static_cast<int64_t>(n / kBlockColumns) * kBlocks + k / kBlockInputs;
    return block * kBlockElements + row * kBlockInputs + chunk * perChunk + inChunk;
}

// Channels of a head that turn: none of a value head.
TRTLLM_KVMAP_HOST_DEVICE constexpr int32_t turningChannels(ModelShape const& shape, Field field)
{
    return field == Field::kKEY ? shape.rotaryDim : 0;
}

// The channel that packed column `column` of a head holds; the pair (2i, 2i + 1) of columns turns together.
TRTLLM_KVMAP_HOST_DEVICE constexpr int32_t channelOfColumn(int32_t column, int32_t turning, int32_t interleaved)
{
    return interleaved || column >= turning ? column : column / 2 + column % 2 * (turning / 2);
}

} // namespace trtllm_kvmap
