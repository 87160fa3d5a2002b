#pragma once

// One block of CUDA threads on fibers: who runs next, who waits for whom, and the block's shared memory.

#include "emulator/fiber.h"
#include "emulator/launch.h"
#include "emulator/thread.h"
#include "emulator/warp.h"

#include <array>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace trtllm_kvmap::emulator
{

constexpr int kWARP = 32;
constexpr int kMAX_THREADS = 1024;
constexpr int kNUM_BARRIERS = 16;
constexpr std::size_t kMAX_SHARED = 227 << 10;

//! What a group of threads does together; all of the group must be at the same.
enum class Collective : std::uint8_t
{
    kNONE,
    kSYNC_WARP,
    kSHUFFLE,
    kBALLOT,
    kLDMATRIX,
    kLDMATRIX_TRANS,
    kMMA_BF16,
    kMMA_FP16,
    kWGMMA,
    kWGMMA_COMMIT,
    kWGMMA_WAIT,
};

char const* name(Collective collective);

//! A cp.async that has been issued and not yet waited for.
struct AsyncCopy
{
    unsigned char* destination;
    void const* source;
    bool valid;
    std::uint32_t group;
};

//! A TMA box that has been issued and has not landed.
struct TensorCopy
{
    unsigned char map[128];
    unsigned char* shared;
    std::int32_t coordinates[5];
    std::uint32_t destination;
    std::uint32_t mbarrier;
    std::uint32_t bytes;
    bool late; //!< lands when nobody can go on without it
};

struct Mbarrier
{
    std::uint32_t address;
    std::uint32_t arrivals; //!< of every phase
    std::uint32_t pending; //!< of this phase
    std::int64_t bytes; //!< that this phase still waits for
    std::uint32_t phase; //!< parity of the phase that is not complete
    int slot;
};

constexpr int kMAX_MBARRIERS = 64;
constexpr int kMAX_TENSOR_COPIES = 64;

//! A wgmma that has been issued and not yet waited for.
struct WarpgroupProduct
{
    MmaType type;
    int columns;
    std::uint64_t a; //!< descriptors
    std::uint64_t b;
    float* accumulators[128]; //!< by thread
    std::vector<float> aValues; //!< [64][16] when A came from registers
    std::vector<float> d; //!< [64][columns], what the product is added to
    bool chained; //!< d is the result of an earlier product in flight
    std::uint32_t group;
};

struct Warpgroup
{
    std::deque<WarpgroupProduct> products;
    std::int64_t openGroup { 0 };
};

struct Thread : ThreadContext
{
    enum class State : std::uint8_t
    {
        kREADY,
        kAT_COLLECTIVE,
        kAT_BARRIER,
        kAT_MBARRIER,
        kENDED,
    };

    Fiber fiber;
    State state { State::kREADY };
    Collective collective { Collective::kNONE };
    int barrier { 0 }; //!< that it waits at
    std::uint32_t mbarrier { 0 }; //!< that it waits at
    int linear { 0 }; //!< index in the block
    void* operands { nullptr }; //!< of the collective it is at
    std::vector<AsyncCopy> copies;
    std::uint32_t openGroup { 0 }; //!< number of the cp.async group not yet committed
};

//! Threads on their way to a collective.
struct Gathering
{
    Collective collective { Collective::kNONE };
    int arrived { 0 };
    unsigned generation { 0 };
};

struct Barrier
{
    int expected { 0 };
    int arrived { 0 };
    unsigned generation { 0 };
};

class Block
{
public:
    Block(Options const& options, dim3 grid, dim3 shape, std::size_t sharedBytes, void (*body)(void const*),
        void const* arguments);
    ~Block();
    Block(Block const&) = delete;
    Block& operator=(Block const&) = delete;

    //! Run the block \p index of the grid to its end. Returns what went wrong, or nothing.
    std::string run(std::uint64_t index);

    //! The block that runs on this host thread, or nullptr.
    static Block* current();

    Thread& running()
    {
        return *mRunning;
    }

    //! Wait until all \p size threads of the running thread's group (a warp, a warpgroup) are at \p collective with
    //! their operands; the last one executes it for all.
    void gather(Collective collective, int size, void* operands, void (*execute)(Block&, Thread*));

    void arrive(int barrier, int count);
    void wait(int barrier, int count);

    //! Wait until the phase of an mbarrier changes (true), or, at random, not at all (false).
    bool waitForMbarrier(std::uint32_t address);
    void wakeMbarrierWaiters(std::uint32_t address);

    //! What orders memory between arrivals at a phase of an mbarrier, by default the one not complete, and its waiters.
    void* mbarrierToken(Mbarrier const& mbarrier, std::uint32_t phase) const;
    void* mbarrierToken(Mbarrier const& mbarrier) const;

    Warpgroup& warpgroup(Thread const& thread)
    {
        return mWarpgroups[static_cast<std::size_t>(thread.linear / (4 * kWARP))];
    }

    std::array<Mbarrier, kMAX_MBARRIERS> mbarriers;
    int numMbarriers { 0 };
    std::array<TensorCopy, kMAX_TENSOR_COPIES> tensorCopies;
    int numTensorCopies { 0 };

    //! End the block with a sentence.
    [[noreturn]] void fail(char const* format, std::va_list arguments);

    unsigned char* shared() const
    {
        return mShared;
    }

    std::size_t sharedBytes() const
    {
        return mSharedBytes;
    }

    Options const& options() const
    {
        return mOptions;
    }

    std::uint64_t random();

    Statistics statistics;

private:
    static void threadEntry();

    void mapMemory();
    void unmapMemory();
    void start(std::uint64_t index);
    void makeReady(Thread& thread);
    Thread* next();
    void landTensorCopies();
    //! Let others run; the running thread has been made ready, or waits, or has ended.
    void reschedule();
    //! After the running thread has released others: who goes on is again a question of the order.
    void share();
    void switchTo(Fiber& to, bool runningEnds);
    void poisonShared();
    std::string describeWait() const;
    std::string checkMargins() const;
    void* token(int index, unsigned generation) const;

    Options mOptions;
    dim3 mGrid;
    dim3 mShape;
    int mNumThreads;
    void (*mBody)(void const*);
    void const* mArguments;

    // One mapping: order tokens for TSan, a margin, shared memory, a margin, the stacks.
    unsigned char* mMemory { nullptr };
    std::size_t mMemoryBytes { 0 };
    unsigned char* mShared { nullptr };
    std::size_t mSharedBytes;

    std::vector<Thread> mThreads;
    std::vector<int> mReady; //!< linear thread indices, unordered
    int mNumReady { 0 };
    int mNumAlive { 0 };
    Thread* mRunning { nullptr };
    Fiber mHost;
    std::array<Gathering, kMAX_THREADS / kWARP> mGatherings; //!< by the first warp of the group
    std::array<Barrier, kNUM_BARRIERS> mBarriers;
    std::array<Warpgroup, kMAX_THREADS / (4 * kWARP)> mWarpgroups;
    std::uint64_t mRandom { 1 };
    bool mFailed { false };
    char mError[512] {};
};

//! An error if there is no mbarrier; what the running thread did before is then seen by those who wait for it.
void checkMbarrier(std::uint32_t address, char const* instruction);

//! Bytes of a TMA copy have come.
void completeMbarrierBytes(Block& block, std::uint32_t address, std::uint32_t bytes);

//! The copy \p index of the block's copies in flight takes place.
void landTensorCopy(Block& block, int index);

} // namespace trtllm_kvmap::emulator
