#include "emulator/block.h"

#include "emulator/sanitizer.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace trtllm_kvmap::emulator
{

__thread ThreadContext* tThread = nullptr;

namespace
{

__thread Block* tBlock = nullptr;

constexpr std::size_t kPAGE = 4096;
constexpr std::size_t kMARGIN = 1024; //!< on both sides of shared memory
constexpr unsigned char kPOISON = 0xff; //!< NaN in bf16, fp16, fp8 and float32
constexpr unsigned char kMARGIN_BYTE = 0xa5; //!< what a write out of range would change
constexpr std::size_t kMAX_ASYNC_COPIES = 512; //!< in flight per thread

//! All threads of a launch have ended before what the host does next; not part of a block's memory.
char gEndOfThreads;

std::size_t roundUp(std::size_t value, std::size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

std::uint64_t mix(std::uint64_t value) // splitmix64
{
    value += 0x9e3779b97f4a7c15ULL;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
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
    return tBlock;
}

Block::Block(Options const& options, dim3 grid, dim3 shape, std::size_t sharedBytes, void (*body)(void const*),
    void const* arguments)
    : mOptions(options)
    , mGrid(grid)
    , mShape(shape)
    , mNumThreads(static_cast<int>(shape.x * shape.y * shape.z))
    , mBody(body)
    , mArguments(arguments)
    , mSharedBytes(sharedBytes)
    , mThreads(static_cast<std::size_t>(mNumThreads))
    , mReady(static_cast<std::size_t>(mNumThreads))
{
    for (int i = 0; i < mNumThreads; ++i)
    {
        Thread& thread = mThreads[static_cast<std::size_t>(i)];
        auto const linear = static_cast<unsigned>(i);
        thread.linear = i;
        thread.threadIndex = uint3 { linear % shape.x, linear / shape.x % shape.y, linear / (shape.x * shape.y) };
        thread.blockShape = shape;
        thread.gridShape = grid;
        // Never grows: under TSan, memory that fibers share unseen must not move through memmove.
        thread.copies.reserve(kMAX_ASYNC_COPIES);
    }
    adoptHostStack(mHost);
    mapMemory();
}

Block::~Block()
{
    acquireOrder(&gEndOfThreads);
    unmapMemory();
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
        Fiber& fiber = mThreads[static_cast<std::size_t>(i)].fiber;
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

void Block::start(std::uint64_t index)
{
    uint3 const blockIndex { static_cast<unsigned>(index % mGrid.x), static_cast<unsigned>(index / mGrid.x % mGrid.y),
        static_cast<unsigned>(index / (static_cast<std::uint64_t>(mGrid.x) * mGrid.y)) };
    mRandom = mix(mix(mOptions.seed) + index) | 1;
    mNumReady = 0;
    mNumAlive = mNumThreads;
    mFailed = false;
    mGatherings.fill({});
    mBarriers.fill({});
    mWarpgroups.fill({});
    numMbarriers = 0;
    numTensorCopies = 0;
    poisonShared();
    for (Thread& thread : mThreads)
    {
        constexpr std::size_t kSTAGGER = 192;
        constexpr std::size_t kSTAGGERED = 61;
        thread.blockIndex = blockIndex;
        thread.collective = Collective::kNONE;
        thread.copies.clear();
        thread.openGroup = 0;
        prepareFiber(
            thread.fiber, &Block::threadEntry, static_cast<std::size_t>(thread.linear) % kSTAGGERED * kSTAGGER);
        makeReady(thread);
    }
}

std::string Block::run(std::uint64_t index)
{
    if (underTsan())
    {
        // Fresh addresses have no history: what two blocks do to global memory stays unordered, and a race between
        // them is seen, while shared memory and stacks start anew.
        unmapMemory();
        mapMemory();
    }
    start(index);
    tBlock = this;
    mRunning = next();
    tThread = mRunning;
    ++statistics.switches;
    switchFiber(mHost, mRunning->fiber, false);
    tBlock = nullptr;
    tThread = nullptr;

    std::string error;
    if (mFailed)
    {
        acquireOrder(&mFailed);
        error = mError;
    }
    else if (mNumAlive > 0)
    {
        uint3 const block = mThreads[0].blockIndex;
        error = "block (" + std::to_string(block.x) + ", " + std::to_string(block.y) + ", " + std::to_string(block.z)
            + "): deadlock, nobody can go on: " + describeWait() + ".";
    }
    else if (numTensorCopies > 0)
    {
        error = "the block ends with " + std::to_string(numTensorCopies)
            + " TMA copies in flight; nobody waited for their mbarrier";
    }
    else
    {
        error = checkMargins();
    }
    for (Thread& thread : mThreads)
    {
        discardFiber(thread.fiber);
    }
    return error;
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
        case Thread::State::kENDED:
            return "ended";
        case Thread::State::kREADY:
            break;
        }
        return "ready";
    };
    for (std::size_t first = 0; first < mThreads.size();)
    {
        std::size_t last = first;
        while (last + 1 < mThreads.size() && place(mThreads[last + 1]) == place(mThreads[first]))
        {
            ++last;
        }
        text += (text.empty() ? "threads " : "; threads ") + std::to_string(first) + "-" + std::to_string(last) + " "
            + place(mThreads[first]);
        first = last + 1;
        if (text.size() > 300)
        {
            return text + "; ...";
        }
    }
    return text;
}

void Block::fail(char const* format, std::va_list arguments)
{
    Thread const& thread = *mRunning;
    uint3 const b = thread.blockIndex;
    uint3 const t = thread.threadIndex;
    int const used = std::snprintf(
        mError, sizeof(mError), "block (%u, %u, %u) thread (%u, %u, %u): ", b.x, b.y, b.z, t.x, t.y, t.z);
    std::vsnprintf(mError + used, sizeof(mError) - static_cast<std::size_t>(used), format, arguments);
    mFailed = true;
    releaseOrder(&mFailed);
    switchTo(mHost, true);
    std::abort(); // nobody switches back to a block that failed
}

void Block::threadEntry()
{
    arrivedOnFiber();
    Block& block = *tBlock;
    block.mBody(block.mArguments);
    Thread& thread = block.running();
    if (!thread.copies.empty())
    {
        emulator::fail(
            "the thread ends with %zu cp.async in flight; a cp.async.wait_group is missing", thread.copies.size());
    }
    if (!block.warpgroup(thread).products.empty())
    {
        emulator::fail("the thread ends with a wgmma in flight; a wgmma.wait_group is missing");
    }
    releaseOrder(&gEndOfThreads);
    thread.state = Thread::State::kENDED;
    --block.mNumAlive;
    block.reschedule();
    std::abort(); // nobody switches back to a thread that has ended
}

std::uint64_t Block::random() // xorshift64
{
    mRandom ^= mRandom << 13;
    mRandom ^= mRandom >> 7;
    mRandom ^= mRandom << 17;
    return mRandom;
}

void Block::makeReady(Thread& thread)
{
    thread.state = Thread::State::kREADY;
    thread.collective = Collective::kNONE;
    mReady[static_cast<std::size_t>(mNumReady++)] = thread.linear;
}

void Block::landTensorCopies()
{
    // In any order; the late ones, half of them, when nobody can go on without, the others at any time before.
    constexpr unsigned kSELDOM = 8;
    bool const poisoned = mOptions.asyncCopies == AsyncCopies::kPOISONED;
    while (numTensorCopies > 0 && mNumAlive > 0 && (mNumReady == 0 || (poisoned && random() % kSELDOM == 0)))
    {
        auto const chosen = static_cast<int>(random() % static_cast<unsigned>(numTensorCopies));
        if (mNumReady == 0 || !tensorCopies[static_cast<std::size_t>(chosen)].late)
        {
            landTensorCopy(*this, chosen);
        }
    }
}

Thread* Block::next()
{
    landTensorCopies();
    if (mNumReady == 0)
    {
        return nullptr;
    }
    std::size_t chosen = 0;
    auto const numReady = static_cast<std::size_t>(mNumReady);
    if (mOptions.order == ThreadOrder::kRANDOM)
    {
        chosen = random() % numReady;
    }
    else
    {
        bool const lowest = mOptions.order == ThreadOrder::kIN_ORDER;
        for (std::size_t i = 1; i < numReady; ++i)
        {
            if ((mReady[i] < mReady[chosen]) == lowest)
            {
                chosen = i;
            }
        }
    }
    Thread* const thread = &mThreads[static_cast<std::size_t>(mReady[chosen])];
    mReady[chosen] = mReady[numReady - 1];
    --mNumReady;
    return thread;
}

void Block::switchTo(Fiber& to, bool runningEnds)
{
    ++statistics.switches;
    switchFiber(mRunning->fiber, to, runningEnds);
}

void Block::reschedule()
{
    Thread* const self = mRunning;
    Thread* const other = next();
    if (other == self)
    {
        return;
    }
    bool const ends = self->state == Thread::State::kENDED;
    if (other == nullptr)
    {
        switchTo(mHost, ends); // all have ended, or nobody can go on: run() tells which
        std::abort();
    }
    ++statistics.switches;
    mRunning = other;
    tThread = other;
    switchFiber(self->fiber, other->fiber, ends);
}

void Block::share()
{
    if (mOptions.order == ThreadOrder::kRANDOM && (random() & 1) != 0)
    {
        return; // going on at once is one of the possible orders, and saves a switch
    }
    makeReady(*mRunning);
    reschedule();
}

void* Block::token(int index, unsigned generation) const
{
    // Two per barrier, used in turn: a thread may be at the next round before the last has left this one.
    return mMemory + static_cast<std::size_t>(index) * 2 + (generation & 1);
}

bool Block::waitForMbarrier(std::uint32_t address)
{
    Thread& self = *mRunning;
    if (mOptions.order == ThreadOrder::kRANDOM && (random() & 1) != 0)
    {
        makeReady(self);
        reschedule();
        return false;
    }
    self.state = Thread::State::kAT_MBARRIER;
    self.mbarrier = address;
    reschedule();
    return true;
}

void Block::wakeMbarrierWaiters(std::uint32_t address)
{
    for (Thread& thread : mThreads)
    {
        if (thread.state == Thread::State::kAT_MBARRIER && thread.mbarrier == address)
        {
            makeReady(thread);
        }
    }
}

void* Block::mbarrierToken(Mbarrier const& mbarrier, std::uint32_t phase) const
{
    return token(kNUM_BARRIERS + kMAX_THREADS / kWARP + mbarrier.slot, phase);
}

void* Block::mbarrierToken(Mbarrier const& mbarrier) const
{
    return mbarrierToken(mbarrier, mbarrier.phase);
}

void Block::gather(Collective collective, int size, void* operands, void (*execute)(Block&, Thread*))
{
    Thread& self = *mRunning;
    int const first = self.linear / size * size;
    if (first + size > mNumThreads)
    {
        emulator::fail("%s needs groups of %d threads; the block has %d", name(collective), size, mNumThreads);
    }
    Thread* const group = &mThreads[static_cast<std::size_t>(first)];
    Gathering& gathering = mGatherings[static_cast<std::size_t>(first / kWARP)];
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
                makeReady(group[i]);
            }
        }
        self.collective = Collective::kNONE;
        share();
    }
    else
    {
        self.state = Thread::State::kAT_COLLECTIVE;
        reschedule();
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
        ++statistics.barriers;
        barrier.arrived = 0;
        ++barrier.generation;
        for (Thread& thread : mThreads)
        {
            if (thread.state == Thread::State::kAT_BARRIER && thread.barrier == id)
            {
                makeReady(thread);
            }
        }
    }
}

void Block::wait(int id, int count)
{
    Barrier& barrier = mBarriers[static_cast<std::size_t>(id & (kNUM_BARRIERS - 1))];
    unsigned const generation = barrier.generation;
    Thread& self = *mRunning;
    arrive(id, count);
    if (barrier.generation != generation)
    {
        share();
    }
    else
    {
        self.state = Thread::State::kAT_BARRIER;
        self.barrier = id;
        reschedule();
    }
    acquireOrder(token(id, generation));
}

} // namespace trtllm_kvmap::emulator
