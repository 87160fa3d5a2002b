#include "emulator/block.h"

#include "emulator/cluster.h"
#include "emulator/sanitizer.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace trtllm_kvmap::emulator
{

namespace
{

constexpr std::size_t kPAGE = 4096;
constexpr std::size_t kMARGIN = 1024; //!< on both sides of shared memory
constexpr unsigned char kPOISON = 0xff; //!< NaN in bf16, fp16, fp8 and float32
constexpr unsigned char kMARGIN_BYTE = 0xa5; //!< what a write out of range would change
constexpr std::size_t kMAX_ASYNC_COPIES = 512; //!< in flight per thread

std::size_t roundUp(std::size_t value, std::size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

} // namespace

char const* name(Collective collective)
{
    switch (collective)
    {
    case Collective::kNONE:
        return "nothing";
    case Collective::kSYNC_WARP:
        return "__syncwarp";
    case Collective::kSHUFFLE:
        return "shfl.sync";
    case Collective::kBALLOT:
        return "vote.sync";
    case Collective::kLDMATRIX:
        return "ldmatrix";
    case Collective::kLDMATRIX_TRANS:
        return "ldmatrix.trans";
    case Collective::kMMA_BF16:
        return "mma.sync bf16";
    case Collective::kMMA_FP16:
        return "mma.sync fp16";
    case Collective::kWGMMA:
        return "wgmma.mma_async";
    case Collective::kWGMMA_COMMIT:
        return "wgmma.commit_group";
    case Collective::kWGMMA_WAIT:
        return "wgmma.wait_group";
    }
    return "?";
}

Block* Block::current()
{
    return tThread == nullptr ? nullptr : static_cast<Thread*>(tThread)->block;
}

Block::Block(Cluster& cluster, std::uint32_t rank, std::uint32_t clusterBlocks, dim3 grid, dim3 shape,
    std::size_t sharedBytes)
    : threads(static_cast<std::size_t>(shape.x * shape.y * shape.z))
    , mCluster(cluster)
    , mRank(rank)
    , mGrid(grid)
    , mNumThreads(static_cast<int>(threads.size()))
    , mSharedBytes(sharedBytes)
{
    for (int i = 0; i < mNumThreads; ++i)
    {
        Thread& thread = threads[static_cast<std::size_t>(i)];
        auto const linear = static_cast<unsigned>(i);
        thread.block = this;
        thread.linear = i;
        thread.threadIndex = uint3 { linear % shape.x, linear / shape.x % shape.y, linear / (shape.x * shape.y) };
        thread.blockShape = shape;
        thread.gridShape = grid;
        thread.clusterRank = rank;
        thread.clusterBlocks = clusterBlocks;
        // Never grows: under TSan, memory that fibers share unseen must not move through memmove.
        thread.copies.reserve(kMAX_ASYNC_COPIES);
    }
    mapMemory();
}

Block::~Block()
{
    unmapMemory();
}

Options const& Block::options() const
{
    return mCluster.options();
}

std::uint64_t Block::random()
{
    return mCluster.random();
}

Statistics& Block::statistics()
{
    return mCluster.statistics;
}

std::string Block::place() const
{
    uint3 const index = threads[0].blockIndex;
    return "block (" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

void Block::mapMemory()
{
    std::size_t const stackBytes = fiberStackBytes();
    std::size_t const sharedArea = roundUp(kMARGIN + mSharedBytes + kMARGIN, kPAGE);
    mMemoryBytes = kPAGE + sharedArea + static_cast<std::size_t>(mNumThreads) * stackBytes;
    void* const memory
        = mmap(nullptr, mMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
    {
        std::perror("emulator: mmap");
        std::abort();
    }
    mMemory = static_cast<unsigned char*>(memory);
    mShared = mMemory + kPAGE + kMARGIN;
    for (int i = 0; i < mNumThreads; ++i)
    {
        Fiber& fiber = threads[static_cast<std::size_t>(i)].fiber;
        fiber.stack = mMemory + kPAGE + sharedArea + static_cast<std::size_t>(i) * stackBytes;
        fiber.stackBytes = stackBytes;
    }
}

void Block::unmapMemory()
{
    if (underAsan())
    {
        __asan_unpoison_memory_region(mMemory, mMemoryBytes);
    }
    munmap(mMemory, mMemoryBytes);
}

void Block::poisonShared()
{
    if (underAsan())
    {
        __asan_unpoison_memory_region(mShared - kMARGIN, kMARGIN + mSharedBytes + kMARGIN);
    }
    std::memset(mShared - kMARGIN, kMARGIN_BYTE, kMARGIN);
    std::memset(mShared + mSharedBytes, kMARGIN_BYTE, kMARGIN);
    std::memset(mShared, kPOISON, mSharedBytes);
    if (underAsan())
    {
        __asan_poison_memory_region(mShared - kMARGIN, kMARGIN);
        __asan_poison_memory_region(mShared + mSharedBytes, kMARGIN);
    }
}

std::string Block::checkMargins() const
{
    if (underAsan())
    {
        return {}; // it has already reported
    }
    for (std::size_t i = 0; i < kMARGIN; ++i)
    {
        if (mShared[mSharedBytes + i] != kMARGIN_BYTE)
        {
            return "shared memory was written " + std::to_string(i) + " bytes past its end (it has "
                + std::to_string(mSharedBytes) + " bytes)";
        }
        if (*(mShared - 1 - i) != kMARGIN_BYTE)
        {
            return "shared memory was written " + std::to_string(i + 1) + " bytes before its start";
        }
    }
    return {};
}

void Block::start(std::uint64_t index, void (*entry)())
{
    if (underTsan())
    {
        // Fresh addresses have no history: what two blocks do to global memory stays unordered, and a race between
        // them is seen, while shared memory and stacks start anew.
        unmapMemory();
        mapMemory();
    }
    uint3 const blockIndex { static_cast<unsigned>(index % mGrid.x), static_cast<unsigned>(index / mGrid.x % mGrid.y),
        static_cast<unsigned>(index / (static_cast<std::uint64_t>(mGrid.x) * mGrid.y)) };
    numAlive = mNumThreads;
    mWarpGatherings.fill({});
    mWarpgroupGatherings.fill({});
    mBarriers.fill({});
    mWarpgroups.fill({});
    numMbarriers = 0;
    poisonShared();
    for (Thread& thread : threads)
    {
        constexpr std::size_t kSTAGGER = 192;
        constexpr std::size_t kSTAGGERED = 61;
        thread.blockIndex = blockIndex;
        thread.clusterRound = -1;
        thread.copies.clear();
        thread.openGroup = 0;
        prepareFiber(thread.fiber, entry, static_cast<std::size_t>(thread.linear) % kSTAGGERED * kSTAGGER);
        mCluster.makeReady(thread);
    }
}

void Block::discardFibers()
{
    for (Thread& thread : threads)
    {
        discardFiber(thread.fiber);
    }
}

std::string Block::describeWait() const
{
    // By place, in the order of the first thread there: "threads 0-31 at __syncthreads".
    std::string text;
    auto const place = [](Thread const& thread) -> std::string
    {
        switch (thread.state)
        {
        case Thread::State::kAT_COLLECTIVE:
            return std::string("at ") + name(thread.collective);
        case Thread::State::kAT_BARRIER:
            return "at barrier " + std::to_string(thread.barrier);
        case Thread::State::kAT_MBARRIER:
            return "at the mbarrier at shared address " + std::to_string(thread.mbarrier - kSHARED_BASE);
        case Thread::State::kAT_CLUSTER_BARRIER:
            return "at barrier.cluster";
        case Thread::State::kENDED:
            return "ended";
        case Thread::State::kREADY:
            break;
        }
        return "ready";
    };
    for (std::size_t first = 0; first < threads.size();)
    {
        std::size_t last = first;
        while (last + 1 < threads.size() && place(threads[last + 1]) == place(threads[first]))
        {
            ++last;
        }
        text += (text.empty() ? "threads " : "; threads ") + std::to_string(first) + "-" + std::to_string(last) + " "
            + place(threads[first]);
        first = last + 1;
        if (text.size() > 300)
        {
            return text + "; ...";
        }
    }
    return text;
}

void* Block::token(int index, unsigned generation) const
{
    // Two per barrier, used in turn: a thread may be at the next round before the last has left this one.
    return mMemory + static_cast<std::size_t>(index) * 2 + (generation & 1);
}

bool Block::waitForMbarrier(std::uint32_t address)
{
    Thread& self = mCluster.running();
    if (options().order == ThreadOrder::kRANDOM && (random() & 1) != 0)
    {
        mCluster.makeReady(self);
        mCluster.reschedule();
        return false;
    }
    self.state = Thread::State::kAT_MBARRIER;
    self.mbarrier = address;
    mCluster.reschedule();
    return true;
}

void Block::wakeMbarrierWaiters(std::uint32_t address)
{
    for (Thread& thread : threads)
    {
        if (thread.state == Thread::State::kAT_MBARRIER && thread.mbarrier == address)
        {
            mCluster.makeReady(thread);
        }
    }
}

void* Block::mbarrierToken(Mbarrier const& mbarrier, std::uint32_t phase) const
{
    return token(kNUM_BARRIERS + kMAX_THREADS / kWARP + mbarrier.slot, phase);
}

void* Block::clusterToken(unsigned round) const
{
    return token(kNUM_BARRIERS + kMAX_THREADS / kWARP + kMAX_MBARRIERS, round);
}

void* Block::mbarrierToken(Mbarrier const& mbarrier) const
{
    return mbarrierToken(mbarrier, mbarrier.phase);
}

void Block::gather(Collective collective, int size, void* operands, void (*execute)(Block&, Thread*))
{
    Thread& self = mCluster.running();
    int const first = self.linear / size * size;
    if (first + size > mNumThreads)
    {
        emulator::fail("%s needs groups of %d threads; the block has %d", name(collective), size, mNumThreads);
    }
    Thread* const group = &threads[static_cast<std::size_t>(first)];
    // One warp of a warpgroup may still be on its own while others wait for it.
    auto& gatherings = size == kWARP ? mWarpGatherings : mWarpgroupGatherings;
    Gathering& gathering = gatherings[static_cast<std::size_t>(first / kWARP)];
    if (gathering.arrived > 0 && gathering.collective != collective)
    {
        emulator::fail("divergence: this thread is at %s, others of its group are at %s", name(collective),
            name(gathering.collective));
    }
    // Only __syncwarp orders memory between lanes; shuffles, ldmatrix and mma do not.
    bool const ordersMemory = collective == Collective::kSYNC_WARP;
    void* const order = token(kNUM_BARRIERS + first / kWARP, gathering.generation);
    if (ordersMemory)
    {
        releaseOrder(order);
    }
    self.operands = operands;
    self.collective = collective;
    gathering.collective = collective;
    if (++gathering.arrived == size)
    {
        gathering.arrived = 0;
        gathering.generation += ordersMemory ? 1 : 0;
        if (execute != nullptr)
        {
            UnseenByTsan const unseen;
            execute(*this, group);
        }
        for (int i = 0; i < size; ++i)
        {
            if (&group[i] != &self)
            {
                mCluster.makeReady(group[i]);
            }
        }
        self.collective = Collective::kNONE;
        mCluster.share();
    }
    else
    {
        self.state = Thread::State::kAT_COLLECTIVE;
        mCluster.reschedule();
    }
    if (ordersMemory)
    {
        acquireOrder(order);
    }
}

void Block::arrive(int id, int count)
{
    if (id < 0 || id >= kNUM_BARRIERS)
    {
        emulator::fail("barrier %d: a block has barriers 0 to %d", id, kNUM_BARRIERS - 1);
    }
    if (count <= 0 || count % kWARP != 0 || count > mNumThreads)
    {
        emulator::fail(
            "barrier %d: a count of %d threads; it must be whole warps of this block of %d", id, count, mNumThreads);
    }
    Barrier& barrier = mBarriers[static_cast<std::size_t>(id)];
    if (barrier.arrived > 0 && barrier.expected != count)
    {
        emulator::fail("barrier %d: this thread expects %d threads, others expect %d", id, count, barrier.expected);
    }
    releaseOrder(token(id, barrier.generation));
    barrier.expected = count;
    if (++barrier.arrived == count)
    {
        ++statistics().barriers;
        barrier.arrived = 0;
        ++barrier.generation;
        for (Thread& thread : threads)
        {
            if (thread.state == Thread::State::kAT_BARRIER && thread.barrier == id)
            {
                mCluster.makeReady(thread);
            }
        }
    }
}

void Block::wait(int id, int count)
{
    Barrier& barrier = mBarriers[static_cast<std::size_t>(id & (kNUM_BARRIERS - 1))];
    unsigned const generation = barrier.generation;
    Thread& self = mCluster.running();
    arrive(id, count);
    if (barrier.generation != generation)
    {
        mCluster.share();
    }
    else
    {
        self.state = Thread::State::kAT_BARRIER;
        self.barrier = id;
        mCluster.reschedule();
    }
    acquireOrder(token(id, generation));
}

} // namespace trtllm_kvmap::emulator
