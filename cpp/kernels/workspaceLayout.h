// How mapKvCache cuts a span into chunks, and what lies where in its workspace. One formula for every caller.
#pragma once

#include "kernels/packedMap.h"

#include <algorithm>

namespace trtllm_kvmap
{

constexpr int32_t kWideTileRows = 256;
constexpr int32_t kNarrowTileRows = 128;
constexpr int32_t kSmallTileRows = 64;
constexpr int64_t kWorkspaceAlignment = 256;
// Longer chunks gain nothing, and with these every count of tiles fits into 32 bits.
constexpr int32_t kMaxChunkTokens = 1 << 16;
// Tiles that keep a large GPU busy for about two waves of two blocks a multiprocessor. A constant, not a question to
// the device: the order of a split sum must not depend on where it runs.
constexpr int32_t kBusyTiles = 512;

// Where one token lies on both sides. sourceBlock is -1 when the token is skipped or only fills up a tile.
struct TokenRow
{
    int32_t sourceBlock;
    int32_t sourceOffset;
    int32_t targetBlock;
    int32_t targetOffset;
    int32_t position;
    int32_t tokenId;
};

// Offsets in bytes. `source` and `own` hold un-rotated slices, [slice][chunkTokens][sliceWidth] of the compute type.
struct WorkspaceLayout
{
    Variant variant; // never kAUTO
    int32_t tileRows;
    int32_t chunkTokens; // whole tiles
    int32_t numTiles;    // column tiles
    int32_t numSplits;   // of K; 1 writes the result at once
    int64_t rows;
    int64_t source;
    int64_t own;
    int64_t partials; // float [split][column tile][row tile][tile]
    int64_t bytes;
};

inline Variant chooseVariant(PackedMap const& map, int64_t numTokens, Variant wanted)
{
    if (map.computeType == DType::kFLOAT32)
    {
        return Variant::kNARROW; // the one plain kernel for float32, whatever is wanted
    }
    if (wanted != Variant::kAUTO)
    {
        return wanted;
    }
    if (numTokens <= kSmallTileRows)
    {
        return Variant::kSMALL_T;
    }
    // Wide tiles unless half of their rows or a quarter of their columns would be padding.
    bool const full = 4 * int64_t{map.numNarrowTiles} >= 3 * 2 * int64_t{map.numWideTiles};
    return full && numTokens > kNarrowTileRows ? Variant::kWIDE : Variant::kNARROW;
}

inline WorkspaceLayout layOutWorkspace(PackedMap const& map, int64_t numTokens, int32_t chunkTokens, Variant wanted)
{
    WorkspaceLayout layout{};
    layout.variant = chooseVariant(map, numTokens, wanted);
    bool const small = layout.variant == Variant::kSMALL_T;
    layout.tileRows = small ? kSmallTileRows
        : layout.variant == Variant::kNARROW ? kNarrowTileRows
                                             : kWideTileRows;
    layout.numTiles = layout.variant == Variant::kNARROW ? map.numNarrowTiles : map.numWideTiles;
    int64_t const limit = small ? kSmallTileRows : chunkTokens > 0 ? chunkTokens : kDefaultChunkTokens;
    layout.chunkTokens = static_cast<int32_t>(roundUp(std::min(numTokens, limit), layout.tileRows));
    layout.numSplits = 1;
    if (small && layout.numTiles > 0)
    {
        int32_t const wantedSplits = (kBusyTiles + layout.numTiles - 1) / layout.numTiles;
        layout.numSplits = std::max(1, std::min(wantedSplits, map.maxKBlocks / 2));
    }
    int64_t const elementBytes = sizeOf(map.computeType);
    auto const place = [&](int64_t bytes)
    {
        int64_t const offset = layout.bytes;
        layout.bytes += roundUp(bytes, kWorkspaceAlignment);
        return offset;
    };
    layout.rows = place(layout.chunkTokens * int64_t{sizeof(TokenRow)});
    layout.source
        = place(int64_t{map.numSourceSlices} * layout.chunkTokens * sliceWidth(map.source) * elementBytes);
    layout.own = place(int64_t{map.numSlices - map.numSourceSlices} * layout.chunkTokens * sliceWidth(map.target)
        * elementBytes);
    int64_t const tileFloats = int64_t{layout.tileRows} * kWideColumns;
    layout.partials = place(
        layout.numSplits > 1 ? layout.numSplits * layout.numTiles * tileFloats * int64_t{sizeof(float)} : int64_t{0});
    return layout;
}

} // namespace trtllm_kvmap
