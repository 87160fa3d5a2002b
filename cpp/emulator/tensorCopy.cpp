// TMA: boxes of a tensor to shared memory, landing some time after their issue.

#include "emulator/cluster.h"
#include "emulator/hopper.h"
#include "emulator/sanitizer.h"

#include <cstring>

namespace trtllm_kvmap::emulator
{

namespace
{

constexpr std::size_t kCHUNK = 16; // what a swizzle moves

//! What encodeTensorMap leaves in the 128 opaque bytes.
struct TensorMap
{
    std::uint64_t magic;
    unsigned char* global;
    std::uint64_t strides[kMAX_RANK - 1]; //!< bytes, of dimensions 1...
    std::uint32_t sizes[kMAX_RANK];
    std::uint16_t box[kMAX_RANK];
    std::uint8_t rank;
    std::uint8_t elementBytes;
    std::uint8_t swizzle;
};

static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "A map has the 128 bytes of the driver's.");

constexpr std::uint64_t kMAGIC = 0x74656e736f726d70ULL;

//! The shared address a swizzle moves a chunk to: address bits 4... are changed by bits 7...
std::uint32_t swizzled(std::uint32_t address, int swizzle)
{
    std::uint32_t const mask = (1u << swizzle) - 1; // 32 bytes: one bit, 64: two, 128: three
    return address ^ ((address >> 7 & mask) << 4);
}

std::uint32_t boxBytes(TensorMap const& map)
{
    std::uint32_t bytes = map.elementBytes;
    for (int i = 0; i < map.rank; ++i)
    {
        bytes *= map.box[i];
    }
    return bytes;
}

} // namespace

void landBox(TensorCopy const& copy)
{
    TensorMap map;
    std::memcpy(&map, copy.map, sizeof(map));
    std::uint32_t const rowElements = map.box[0];
    std::uint32_t const numRows = boxBytes(map) / (rowElements * map.elementBytes);
    for (std::uint32_t row = 0; row < numRows; ++row)
    {
        std::int64_t offset = 0;
        bool inside = true;
        std::uint32_t rest = row;
        for (int i = 1; i < map.rank; ++i)
        {
            std::int64_t const index = copy.coordinates[i] + static_cast<std::int64_t>(rest % map.box[i]);
            rest /= map.box[i];
            inside = inside && index >= 0 && index < static_cast<std::int64_t>(map.sizes[i]);
            offset += index * static_cast<std::int64_t>(map.strides[i - 1]);
        }
        for (std::uint32_t element = 0; element < rowElements; ++element)
        {
            std::int64_t const column = copy.coordinates[0] + static_cast<std::int64_t>(element);
            std::uint32_t const linear = copy.destination + (row * rowElements + element) * map.elementBytes;
            unsigned char* const target = copy.block->shared() + (swizzled(linear, map.swizzle) - kSHARED_BASE);
            if (inside && column >= 0 && column < static_cast<std::int64_t>(map.sizes[0]))
            {
                std::memcpy(target, map.global + offset + column * map.elementBytes, map.elementBytes);
            }
            else
            {
                std::memset(target, 0, map.elementBytes);
            }
        }
    }
}

char const* encodeTensorMap(CUtensorMap& map, int rank, int elementBytes, void* global, std::uint64_t const* sizes,
    std::uint64_t const* strides, std::uint32_t const* box, Swizzle swizzle)
{
    TensorMap encoded {};
    if (rank < 1 || rank > kMAX_RANK)
    {
        return "A tensor map needs 1 to 5 dimensions.";
    }
    if (reinterpret_cast<std::uintptr_t>(global) % kCHUNK != 0)
    {
        return "A tensor map needs a global address aligned to 16 bytes.";
    }
    std::uint32_t const rowBytes = box[0] * static_cast<std::uint32_t>(elementBytes);
    if (rowBytes % kCHUNK != 0)
    {
        return "The innermost side of a box must be a multiple of 16 bytes.";
    }
    if (swizzle != Swizzle::kNONE && rowBytes > 16u << static_cast<int>(swizzle))
    {
        return "The innermost side of a box must not be longer than its swizzle.";
    }
    for (int i = 0; i < rank; ++i)
    {
        if (box[i] == 0 || box[i] > 256 || sizes[i] == 0 || sizes[i] > 0xffffffffULL)
        {
            return "A box side must be 1 to 256 elements, a tensor side 1 to 2^32 - 1.";
        }
        if (i > 0 && strides[i - 1] % kCHUNK != 0)
        {
            return "The strides of a tensor map must be multiples of 16 bytes.";
        }
        encoded.sizes[i] = static_cast<std::uint32_t>(sizes[i]);
        encoded.box[i] = static_cast<std::uint16_t>(box[i]);
        if (i > 0)
        {
            encoded.strides[i - 1] = strides[i - 1];
        }
    }
    encoded.magic = kMAGIC;
    encoded.global = static_cast<unsigned char*>(global);
    encoded.rank = static_cast<std::uint8_t>(rank);
    encoded.elementBytes = static_cast<std::uint8_t>(elementBytes);
    encoded.swizzle = static_cast<std::uint8_t>(swizzle);
    std::memcpy(&map, &encoded, sizeof(encoded));
    return nullptr;
}

void copyTensorBox(std::uint32_t destination, CUtensorMap const* map, int rank, std::int32_t const* coordinates,
    std::uint32_t mbarrier)
{
    multicastTensorBox(destination, map, rank, coordinates, mbarrier, 1u << tThread->clusterRank);
}

void multicastTensorBox(std::uint32_t destination, CUtensorMap const* map, int rank, std::int32_t const* coordinates,
    std::uint32_t mbarrier, std::uint32_t blocks)
{
    constexpr char const* kNAME = "cp.async.bulk.tensor";
    Cluster& cluster = Block::current()->cluster();
    TensorMap decoded;
    std::memcpy(&decoded, map, sizeof(decoded));
    if (decoded.magic != kMAGIC || decoded.rank != rank)
    {
        fail("%s: the tensor map was not encoded, or not for %d dimensions", kNAME, rank);
    }
    TensorCopy copy {};
    std::memcpy(copy.map, &decoded, sizeof(decoded));
    copy.sender = &cluster.running();
    copy.destination = destination;
    copy.mbarrier = mbarrier;
    copy.bytes = boxBytes(decoded);
    std::memcpy(copy.coordinates, coordinates, static_cast<std::size_t>(rank) * sizeof(*coordinates));
    auto const offset = static_cast<std::size_t>(sharedBytes(destination, copy.bytes, 1, kNAME) - sharedMemory());
    if (destination % 128 != 0)
    {
        fail("%s: shared address %zu is not aligned to 128 bytes", kNAME, offset);
    }
    if (blocks == 0 || blocks >> cluster.numBlocks() != 0)
    {
        fail("%s: mask 0x%x in a cluster of %u blocks", kNAME, blocks, cluster.numBlocks());
    }
    ++cluster.statistics.tensorCopies;
    for (std::uint32_t receiver = 0; receiver < cluster.numBlocks(); ++receiver)
    {
        if ((blocks >> receiver & 1) == 0)
        {
            continue;
        }
        copy.block = &cluster.block(receiver, kNAME);
        unsigned char* const target = copy.block->shared() + offset;
        noteWrite(target, copy.bytes);
        if (cluster.options().asyncCopies == AsyncCopies::kPOISONED)
        {
            std::memset(target, 0xff, copy.bytes);
        }
        // Whoever waits there comes after this write.
        releaseOrder(copy.block->mbarrierToken(findMbarrier(*copy.block, mbarrier, kNAME)));
        copy.late = (cluster.random() & 1) != 0;
        cluster.send(copy);
    }
}

} // namespace trtllm_kvmap::emulator
