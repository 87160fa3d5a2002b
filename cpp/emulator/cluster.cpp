#include "emulator/cluster.h"

#include "emulator/sanitizer.h"

#include <cstdio>
#include <cstdlib>

namespace trtllm_kvmap::emulator
{

__thread ThreadContext* tThread = nullptr;

namespace
{

//! The cluster that runs on this host thread: a thread that has just started knows nothing else.
__thread Cluster* tCluster = nullptr;

//! All threads of a launch have ended before what the host does next; not part of a block's memory.
char gEndOfThreads;

std::uint64_t mix(std::uint64_t value) // splitmix64
{
    value += 0x9e3779b97f4a7c15ULL;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
}

//! Take one out of an unordered list.
template <typename T>
T takeOut(std::vector<T>& list, std::size_t index)
{
    T const taken = list[index];
    list[index] = list.back();
    list.pop_back();
    return taken;
}

} // namespace

Cluster::Cluster(Options const& options, dim3 grid, std::uint32_t numBlocks, dim3 shape, std::size_t sharedBytes,
    void (*body)(void const*), void const* arguments)
    : mOptions(options)
    , mBody(body)
    , mArguments(arguments)
{
    for (std::uint32_t rank = 0; rank < numBlocks; ++rank)
    {
        mBlocks.push_back(std::make_unique<Block>(*this, rank, numBlocks, grid, shape, sharedBytes));
    }
    mReady.resize(numBlocks * mBlocks[0]->threads.size());
    mNumReadyOf.resize(numBlocks);
    mTensorCopies.reserve(numBlocks * kMAX_ON_THE_WAY);
    mRemoteArrivals.reserve(numBlocks * kMAX_ON_THE_WAY);
    adoptHostStack(mHost);
}

Cluster::~Cluster()
{
    acquireOrder(&gEndOfThreads);
}

Block& Cluster::block(std::uint32_t rank, char const* instruction)
{
    if (rank >= numBlocks())
    {
        emulator::fail("%s: rank %u in a cluster of %u blocks", instruction, rank, numBlocks());
    }
    requireAlive(*mRunning, *mBlocks[rank], instruction);
    return *mBlocks[rank];
}

void Cluster::requireAlive(Thread const& sender, Block const& block, char const* what)
{
    if (block.numAlive > 0)
    {
        return;
    }
    auto const complain = [&](char const* format, ...)
    {
        std::va_list arguments;
        va_start(arguments, format);
        fail(sender, format, arguments);
    };
    complain("%s: %s of the cluster has ended; a block must stay while others reach into its shared memory", what,
        block.place().c_str());
}

int Cluster::numAlive() const
{
    int sum = 0;
    for (auto const& block : mBlocks)
    {
        sum += block->numAlive;
    }
    return sum;
}

std::string Cluster::run(std::uint64_t index)
{
    mRandom = mix(mix(mOptions.seed) + index) | 1;
    mNumReady = 0;
    mNumReadyOf.assign(numBlocks(), 0);
    mFavoured = static_cast<std::uint32_t>(mRandom % numBlocks()); // one begins late
    mFailed = false;
    mArrived = 0;
    mRound = 0;
    mTensorCopies.clear();
    mRemoteArrivals.clear();
    for (auto const& block : mBlocks)
    {
        block->start(index * numBlocks() + block->rank(), &Cluster::threadEntry);
    }
    tCluster = this;
    mRunning = next();
    tThread = mRunning;
    ++statistics.switches;
    switchFiber(mHost, mRunning->fiber, false);
    tCluster = nullptr;
    tThread = nullptr;

    std::string const error = whatIsWrong();
    for (auto const& block : mBlocks)
    {
        block->discardFibers();
    }
    return error;
}

std::string Cluster::whatIsWrong()
{
    if (mFailed)
    {
        acquireOrder(&mFailed);
        return mError;
    }
    if (numAlive() > 0)
    {
        std::string waits;
        for (auto const& block : mBlocks)
        {
            waits += (waits.empty() ? "" : "; ") + block->place() + ": " + block->describeWait();
        }
        return "deadlock, nobody can go on: " + waits + ".";
    }
    if (!mTensorCopies.empty())
    {
        return "the block ends with " + std::to_string(mTensorCopies.size())
            + " TMA copies in flight; nobody waited for their mbarrier";
    }
    if (!mRemoteArrivals.empty())
    {
        return "the cluster ends with " + std::to_string(mRemoteArrivals.size()) + " remote arrivals on their way";
    }
    std::string error;
    for (auto const& block : mBlocks)
    {
        error = error.empty() ? block->checkMargins() : error;
    }
    return error;
}

void Cluster::fail(Thread const& thread, char const* format, std::va_list arguments)
{
    uint3 const t = thread.threadIndex;
    int const used = std::snprintf(
        mError, sizeof(mError), "%s thread (%u, %u, %u): ", thread.block->place().c_str(), t.x, t.y, t.z);
    std::vsnprintf(mError + used, sizeof(mError) - static_cast<std::size_t>(used), format, arguments);
    mFailed = true;
    releaseOrder(&mFailed);
    switchTo(mHost, true);
    std::abort(); // nobody switches back to a block that failed
}

void Cluster::threadEntry()
{
    arrivedOnFiber();
    Cluster& cluster = *tCluster;
    cluster.mBody(cluster.mArguments);
    Thread& thread = cluster.running();
    Block& block = *thread.block;
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
    --block.numAlive;
    cluster.mArrived -= thread.clusterRound == cluster.mRound ? 1 : 0;
    cluster.completeBarrierIfDone();
    cluster.reschedule();
    std::abort(); // nobody switches back to a thread that has ended
}

std::uint64_t Cluster::random() // xorshift64
{
    mRandom ^= mRandom << 13;
    mRandom ^= mRandom >> 7;
    mRandom ^= mRandom << 17;
    return mRandom;
}

// ---- who runs -----------------------------------------------------------------------------------------------------

void Cluster::makeReady(Thread& thread)
{
    thread.state = Thread::State::kREADY;
    thread.collective = Collective::kNONE;
    mReady[mNumReady++] = &thread;
    ++mNumReadyOf[thread.clusterRank];
}

std::size_t Cluster::drawReady()
{
    if (numBlocks() == 1)
    {
        return random() % mNumReady;
    }
    // Blocks run at different speeds: now and then one of them goes first for a while, as far as it comes alone.
    constexpr unsigned kWHILE = 1024;
    if (random() % kWHILE == 0)
    {
        mFavoured = static_cast<std::uint32_t>(random() % (numBlocks() + 1));
    }
    std::size_t chosen = random() % mNumReady;
    while (mFavoured < numBlocks() && mNumReadyOf[mFavoured] > 0 && mReady[chosen]->clusterRank != mFavoured)
    {
        chosen = (chosen + 1) % mNumReady;
    }
    return chosen;
}

Thread* Cluster::next()
{
    deliver();
    if (mNumReady == 0)
    {
        return nullptr;
    }
    std::size_t chosen = 0;
    if (mOptions.order == ThreadOrder::kRANDOM)
    {
        chosen = drawReady();
    }
    else
    {
        bool const lowest = mOptions.order == ThreadOrder::kIN_ORDER;
        auto const place = [](Thread const* thread) { return std::pair(thread->clusterRank, thread->linear); };
        for (std::size_t i = 1; i < mNumReady; ++i)
        {
            if ((place(mReady[i]) < place(mReady[chosen])) == lowest)
            {
                chosen = i;
            }
        }
    }
    Thread* const thread = mReady[chosen];
    mReady[chosen] = mReady[--mNumReady];
    --mNumReadyOf[thread->clusterRank];
    return thread;
}

void Cluster::switchTo(Fiber& to, bool runningEnds)
{
    ++statistics.switches;
    switchFiber(mRunning->fiber, to, runningEnds);
}

void Cluster::reschedule()
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

void Cluster::share()
{
    if (mOptions.order == ThreadOrder::kRANDOM && (random() & 1) != 0)
    {
        return; // going on at once is one of the possible orders, and saves a switch
    }
    makeReady(*mRunning);
    reschedule();
}

// ---- what is on its way -------------------------------------------------------------------------------------------

void Cluster::send(TensorCopy const& copy)
{
    if (mTensorCopies.size() == mTensorCopies.capacity())
    {
        emulator::fail("cp.async.bulk.tensor: more than %zu boxes in flight", mTensorCopies.size());
    }
    {
        UnseenByTsan const unseen;
        mTensorCopies.push_back(copy);
    }
    if (mOptions.asyncCopies == AsyncCopies::kAT_ISSUE)
    {
        land(mTensorCopies.size() - 1);
    }
}

void Cluster::send(RemoteArrival const& arrival)
{
    if (mRemoteArrivals.size() == mRemoteArrivals.capacity())
    {
        emulator::fail("mbarrier.arrive: more than %zu remote arrivals on their way", mRemoteArrivals.size());
    }
    mRemoteArrivals.push_back(arrival);
    if (mOptions.asyncCopies == AsyncCopies::kAT_ISSUE)
    {
        come(mRemoteArrivals.size() - 1);
    }
}

void Cluster::deliver()
{
    // In any order; late boxes, half of them, when nobody can go on without, all else at any time before.
    constexpr unsigned kSELDOM = 8;
    bool const poisoned = mOptions.asyncCopies == AsyncCopies::kPOISONED;
    auto const some = [this] { return mTensorCopies.size() + mRemoteArrivals.size(); };
    while (some() > 0 && numAlive() > 0 && (mNumReady == 0 || (poisoned && random() % kSELDOM == 0)))
    {
        std::size_t const chosen = random() % some();
        if (chosen >= mTensorCopies.size())
        {
            come(chosen - mTensorCopies.size());
        }
        else if (mNumReady == 0 || !mTensorCopies[chosen].late)
        {
            land(chosen);
        }
    }
}

void Cluster::land(std::size_t copy)
{
    requireAlive(*mTensorCopies[copy].sender, *mTensorCopies[copy].block, "a TMA box lands");
    UnseenByTsan const unseen;
    TensorCopy const landing = takeOut(mTensorCopies, copy);
    landBox(landing);
    completeMbarrierBytes(*landing.block, landing.mbarrier, landing.bytes);
}

void Cluster::come(std::size_t arrival)
{
    RemoteArrival const coming = takeOut(mRemoteArrivals, arrival);
    requireAlive(*coming.sender, *coming.block, "an arrival comes");
    arriveAt(*coming.block, coming.mbarrier, "mbarrier.arrive.shared::cluster");
}

// ---- barrier.cluster ----------------------------------------------------------------------------------------------

void Cluster::completeBarrierIfDone()
{
    if (mArrived == 0 || mArrived != numAlive())
    {
        return;
    }
    // Arrivals made before the barrier have come for whoever leaves it.
    while (!mRemoteArrivals.empty())
    {
        come(mRemoteArrivals.size() - 1);
    }
    mArrived = 0;
    ++mRound;
    for (auto const& block : mBlocks)
    {
        for (Thread& thread : block->threads)
        {
            if (thread.state == Thread::State::kAT_CLUSTER_BARRIER)
            {
                makeReady(thread);
            }
        }
    }
}

void Cluster::arrive()
{
    Thread& self = *mRunning;
    if (self.clusterRound >= 0)
    {
        emulator::fail("barrier.cluster.arrive: a second time without a wait");
    }
    releaseOrder(mBlocks[0]->clusterToken(static_cast<unsigned>(mRound)));
    self.clusterRound = mRound;
    ++mArrived;
    completeBarrierIfDone();
}

void Cluster::wait()
{
    Thread& self = *mRunning;
    std::int64_t const round = self.clusterRound;
    if (round < 0)
    {
        emulator::fail("barrier.cluster.wait: without an arrive");
    }
    if (round == mRound)
    {
        self.state = Thread::State::kAT_CLUSTER_BARRIER;
        reschedule();
    }
    else
    {
        share();
    }
    self.clusterRound = -1;
    acquireOrder(mBlocks[0]->clusterToken(static_cast<unsigned>(round)));
}

} // namespace trtllm_kvmap::emulator
