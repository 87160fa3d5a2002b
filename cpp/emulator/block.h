#pragma once

// One block of CUDA threads on fibers: who waits for whom, and the block's shared memory. Who runs next: cluster.h.

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

class Block;
class Cluster;

struct Thread : ThreadContext
{
    enum class State : std::uint8_t
    {
        kREADY,
        kAT_COLLECTIVE,
        kAT_BARRIER,
        kAT_MBARRIER,
        kAT_CLUSTER_BARRIER,
        kENDED,
    };

    Fiber fiber;
    Block* block { nullptr };
    State state { State::kREADY };
    Collective collective { Collective::kNONE };
    int barrier { 0 }; //!< that it waits at
    std::uint32_t mbarrier { 0 }; //!< that it waits at
    int linear { 0 }; //!< index in the block
    std::int64_t clusterRound { -1 }; //!< of barrier.cluster, that it has arrived at and not waited for
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
    Block(Cluster& cluster, std::uint32_t rank, std::uint32_t clusterBlocks, dim3 grid, dim3 shape,
        std::size_t sharedBytes);
    ~Block();
    Block(Block const&) = delete;
    Block& operator=(Block const&) = delete;

    //! Make it the block \p index of the grid: all threads at their beginning, all memory fresh.
    void start(std::uint64_t index, void (*entry)());

    //! What is wrong with a block whose threads have ended, or nothing.
    std::string checkMargins() const;

    //! Threads that have not ended, and where each of them waits.
    std::string describeWait() const;

    void discardFibers();

    //! The block of the thread that runs on this host thread, or nullptr.
    static Block* current();

    Cluster& cluster()
    {
        return mCluster;
    }

    [[nodiscard]] std::uint32_t rank() const
    {
        return mRank;
    }

    [[nodiscard]] std::string place() const;

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

    //! The same for barrier.cluster, of the cluster's first block.
    void* clusterToken(unsigned round) const;

    Warpgroup& warpgroup(Thread const& thread)
    {
        return mWarpgroups[static_cast<std::size_t>(thread.linear / (4 * kWARP))];
    }

    std::array<Mbarrier, kMAX_MBARRIERS> mbarriers;
    int numMbarriers { 0 };
    int numAlive { 0 };
    std::vector<Thread> threads;

    unsigned char* shared() const
    {
        return mShared;
    }

    std::size_t sharedBytes() const
    {
        return mSharedBytes;
    }

    Options const& options() const;
    std::uint64_t random();
    Statistics& statistics();

private:
    void mapMemory();
    void unmapMemory();
    void poisonShared();
    void* token(int index, unsigned generation) const;

    Cluster& mCluster;
    std::uint32_t mRank;
    dim3 mGrid;
    int mNumThreads;

    // One mapping: order tokens for TSan, a margin, shared memory, a margin, the stacks.
    unsigned char* mMemory { nullptr };
    std::size_t mMemoryBytes { 0 };
    unsigned char* mShared { nullptr };
    std::size_t mSharedBytes;

    std::array<Gathering, kMAX_THREADS / kWARP> mWarpGatherings;
    std::array<Gathering, kMAX_THREADS / kWARP> mWarpgroupGatherings; //!< by their first warp
    std::array<Barrier, kNUM_BARRIERS> mBarriers;
    std::array<Warpgroup, kMAX_THREADS / (4 * kWARP)> mWarpgroups;
};

//! The mbarrier at \p address of \p block; an error when there is none.
Mbarrier& findMbarrier(Block& block, std::uint32_t address, char const* instruction);

//! An arrival, or bytes of a TMA copy, have come.
void arriveAt(Block& block, std::uint32_t address, char const* instruction);
void completeMbarrierBytes(Block& block, std::uint32_t address, std::uint32_t bytes);

} // namespace trtllm_kvmap::emulator
