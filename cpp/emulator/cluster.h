#pragma once

// The blocks that run together: a cluster, of one block unless the launch says otherwise. Who runs next, what is on its
// way between blocks (TMA boxes, remote arrivals), and the cluster's barrier.

#include "emulator/block.h"

#include <array>
#include <cstdarg>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trtllm_kvmap::emulator
{

constexpr std::uint32_t kMAX_CLUSTER = 8; //!< blocks of a portable cluster
constexpr std::size_t kMAX_ON_THE_WAY = 64; //!< per block

//! A TMA box that has been issued and has not landed: in one block, so a multicast is several.
struct TensorCopy
{
    unsigned char map[128];
    Thread const* sender;
    Block* block; //!< whose shared memory and mbarrier
    std::int32_t coordinates[5];
    std::uint32_t destination;
    std::uint32_t mbarrier;
    std::uint32_t bytes;
    bool late; //!< lands when nobody can go on without it
};

//! An arrival at another block's mbarrier that has been made and has not come.
struct RemoteArrival
{
    Thread const* sender;
    Block* block;
    std::uint32_t mbarrier;
};

class Cluster
{
public:
    Cluster(Options const& options, dim3 grid, std::uint32_t numBlocks, dim3 shape, std::size_t sharedBytes,
        void (*body)(void const*), void const* arguments);
    ~Cluster();
    Cluster(Cluster const&) = delete;
    Cluster& operator=(Cluster const&) = delete;

    //! Run the cluster \p index of the grid to its end. Returns what went wrong, or nothing.
    std::string run(std::uint64_t index);

    Thread& running()
    {
        return *mRunning;
    }

    [[nodiscard]] std::uint32_t numBlocks() const
    {
        return static_cast<std::uint32_t>(mBlocks.size());
    }

    //! The block of a rank, for an access by \p instruction: an error if there is none, or if all its threads have
    //! ended, when its shared memory is no longer its own.
    Block& block(std::uint32_t rank, char const* instruction);

    //! barrier.cluster: arrive; wait until every thread of the cluster that has not ended has arrived.
    void arrive();
    void wait();

    void send(TensorCopy const& copy);
    void send(RemoteArrival const& arrival);

    void makeReady(Thread& thread);
    //! Let others run; the running thread has been made ready, or waits, or has ended.
    void reschedule();
    //! After the running thread has released others: who goes on is again a question of the order.
    void share();

    //! End the launch with a sentence about a thread.
    [[noreturn]] void fail(Thread const& thread, char const* format, std::va_list arguments);

    [[nodiscard]] Options const& options() const
    {
        return mOptions;
    }

    std::uint64_t random();

    Statistics statistics;

private:
    static void threadEntry();

    Thread* next();
    std::size_t drawReady();
    void switchTo(Fiber& to, bool runningEnds);
    [[nodiscard]] int numAlive() const;
    void deliver();
    void land(std::size_t copy);
    void come(std::size_t arrival);
    void requireAlive(Thread const& sender, Block const& block, char const* what);
    void completeBarrierIfDone();
    std::string whatIsWrong();

    Options mOptions;
    void (*mBody)(void const*);
    void const* mArguments;
    std::vector<std::unique_ptr<Block>> mBlocks;

    std::vector<Thread*> mReady; //!< unordered, the first mNumReady
    std::size_t mNumReady { 0 };
    std::vector<std::size_t> mNumReadyOf; //!< by rank
    std::uint32_t mFavoured { 0 }; //!< rank of the block that goes first for now; numBlocks(): none does
    Thread* mRunning { nullptr };
    Fiber mHost;
    std::vector<TensorCopy> mTensorCopies;
    std::vector<RemoteArrival> mRemoteArrivals;
    int mArrived { 0 }; //!< threads at the cluster's barrier
    std::int64_t mRound { 0 }; //!< of that barrier
    std::uint64_t mRandom { 1 };
    bool mFailed { false };
    char mError[512] {};
};

//! The box of a copy, to its block's shared memory.
void landBox(TensorCopy const& copy);

} // namespace trtllm_kvmap::emulator
