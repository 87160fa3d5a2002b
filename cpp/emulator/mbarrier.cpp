#include "emulator/cluster.h"
#include "emulator/hopper.h"
#include "emulator/sanitizer.h"

#include <cstring>

namespace trtllm_kvmap::emulator
{

namespace
{

constexpr std::size_t kBYTES = 8;
constexpr std::uint32_t kMAX_ARRIVALS = (1u << 20) - 1;

//! What lies in the 8 bytes, so that a barrier that was never made, or was overwritten, is noticed. The state itself is
//! the block's.
std::uint64_t cookie(std::uint32_t address)
{
    return 0x6d62617272696572ULL ^ address;
}

Mbarrier& find(std::uint32_t address, char const* instruction)
{
    return findMbarrier(*Block::current(), address, instruction);
}

void completeIfDone(Block& block, Mbarrier& mbarrier)
{
    if (mbarrier.pending == 0 && mbarrier.bytes == 0)
    {
        mbarrier.pending = mbarrier.arrivals;
        mbarrier.phase ^= 1;
        block.wakeMbarrierWaiters(mbarrier.address);
    }
}

} // namespace

Mbarrier& findMbarrier(Block& block, std::uint32_t address, char const* instruction)
{
    // Its place is checked as one of the thread's own block: all blocks of a launch have as much.
    auto const offset = static_cast<std::size_t>(sharedBytes(address, kBYTES, kBYTES, instruction) - sharedMemory());
    std::uint64_t found;
    std::memcpy(&found, block.shared() + offset, kBYTES);
    for (int i = 0; i < block.numMbarriers; ++i)
    {
        Mbarrier& mbarrier = block.mbarriers[static_cast<std::size_t>(i)];
        if (mbarrier.address == address && found == cookie(address))
        {
            return mbarrier;
        }
    }
    fail("%s: there is no mbarrier at shared address %zu of %s: it was not initialised, or was overwritten",
        instruction, offset, block.place().c_str());
}

void initMbarrier(std::uint32_t address, std::uint32_t arrivals)
{
    Block& block = *Block::current();
    unsigned char* const bytes = sharedBytes(address, kBYTES, kBYTES, "mbarrier.init");
    if (arrivals == 0 || arrivals > kMAX_ARRIVALS)
    {
        fail("mbarrier.init: %u arrivals; at least 1 and at most %u are needed", arrivals, kMAX_ARRIVALS);
    }
    int slot = 0;
    while (slot < block.numMbarriers && block.mbarriers[static_cast<std::size_t>(slot)].address != address)
    {
        ++slot;
    }
    if (slot == kMAX_MBARRIERS)
    {
        fail("mbarrier.init: more than %d mbarriers in a block", kMAX_MBARRIERS);
    }
    block.numMbarriers = slot == block.numMbarriers ? slot + 1 : block.numMbarriers;
    block.mbarriers[static_cast<std::size_t>(slot)] = Mbarrier { address, arrivals, arrivals, 0, 0, slot };
    std::uint64_t const written = cookie(address);
    noteWrite(bytes, kBYTES);
    std::memcpy(bytes, &written, kBYTES);
}

void expectMbarrierBytes(std::uint32_t address, std::uint32_t bytes)
{
    find(address, "mbarrier.expect_tx").bytes += bytes;
}

void arriveMbarrier(std::uint32_t address, std::uint32_t bytes)
{
    Block& block = *Block::current();
    Mbarrier& mbarrier = find(address, "mbarrier.arrive");
    mbarrier.bytes += bytes;
    releaseOrder(block.mbarrierToken(mbarrier));
    arriveAt(block, address, "mbarrier.arrive");
}

void arriveAt(Block& block, std::uint32_t address, char const* instruction)
{
    Mbarrier& mbarrier = findMbarrier(block, address, instruction);
    if (mbarrier.pending == 0)
    {
        fail("%s: more arrivals than the %u of the phase", instruction, mbarrier.arrivals);
    }
    --mbarrier.pending;
    completeIfDone(block, mbarrier);
}

std::uint32_t mapShared(std::uint32_t address, std::uint32_t rank)
{
    std::uint32_t const place = address & ((1u << kRANK_SHIFT) - 1);
    return place | (rank + 1) << kRANK_SHIFT;
}

void arriveClusterMbarrier(std::uint32_t address)
{
    constexpr char const* kNAME = "mbarrier.arrive.shared::cluster";
    Cluster& cluster = Block::current()->cluster();
    std::uint32_t const place = address & ((1u << kRANK_SHIFT) - 1);
    std::uint32_t const rank = address >> kRANK_SHIFT;
    Block& block = rank == 0 ? *Block::current() : cluster.block(rank - 1, kNAME);
    Mbarrier const& mbarrier = findMbarrier(block, place, kNAME);
    releaseOrder(block.mbarrierToken(mbarrier, 0)); // at which phase it comes is not known yet
    releaseOrder(block.mbarrierToken(mbarrier, 1));
    cluster.send(RemoteArrival { &cluster.running(), &block, place });
}

void completeMbarrierBytes(Block& block, std::uint32_t address, std::uint32_t bytes)
{
    for (int i = 0; i < block.numMbarriers; ++i)
    {
        Mbarrier& mbarrier = block.mbarriers[static_cast<std::size_t>(i)];
        if (mbarrier.address == address)
        {
            mbarrier.bytes -= bytes;
            completeIfDone(block, mbarrier);
        }
    }
}

bool tryWaitMbarrier(std::uint32_t address, std::uint32_t parity)
{
    Block& block = *Block::current();
    Mbarrier& mbarrier = find(address, "mbarrier.try_wait");
    void* const order = block.mbarrierToken(mbarrier, parity & 1);
    if (mbarrier.phase == (parity & 1))
    {
        // The instruction may give up after a while; a kernel must ask again.
        if (!block.waitForMbarrier(address))
        {
            return false;
        }
    }
    acquireOrder(order);
    return true;
}

} // namespace trtllm_kvmap::emulator
