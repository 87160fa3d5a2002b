#pragma once

// What a kernel may ask about the thread that runs it, and the shared memory of its block.

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

namespace trtllm_kvmap::emulator
{

struct ThreadContext
{
    uint3 threadIndex;
    uint3 blockIndex;
    dim3 blockShape;
    dim3 gridShape;
    std::uint32_t clusterRank; //!< of the block in its cluster
    std::uint32_t clusterBlocks;
};

//! The CUDA thread whose fiber runs on this host thread. __thread, not thread_local: read without a wrapper call.
extern __thread ThreadContext* tThread;

//! Shared addresses (32 bits, as in PTX) start here, not at 0, so that a forgotten base address is out of range. With
//! rank + 1 in the upper byte they are in the shared memory of that block of the cluster (mapa).
constexpr std::uint32_t kSHARED_BASE = 1024;
constexpr std::uint32_t kRANK_SHIFT = 24;

//! End the launch with a sentence about the current thread.
[[noreturn]] void fail(char const* format, ...) __attribute__((format(printf, 1, 2)));

//! First byte of the block's dynamic shared memory.
unsigned char* sharedMemory();

//! The shared address of a pointer into the block's shared memory; an error for any other pointer.
std::uint32_t sharedAddress(void const* pointer);

//! The bytes behind a shared address of the thread's own block, for a read or write of \p bytes by \p instruction: an
//! error out of range or not aligned to \p alignment.
unsigned char* sharedBytes(std::uint32_t address, std::size_t bytes, std::size_t alignment, char const* instruction);

//! An error if a global address is not aligned to \p alignment.
void checkGlobal(void const* pointer, std::size_t alignment, char const* instruction);

//! bar.sync: wait at barrier \p id until \p count threads are there. syncThreads is barrier 0, the whole block.
void syncThreads();
void syncBarrier(int id, int count);

//! bar.arrive: be counted at barrier \p id without waiting.
void arriveBarrier(int id, int count);

//! barrier.cluster.arrive and .wait of this thread.
void arriveCluster();
void waitCluster();

//! __threadfence. For TSan, what precedes one thread's fence happens before what follows another's later fence.
void threadFence();

//! Read-modify-write as one step among all host threads. T has 4 or 8 bytes.
template <typename T, typename Update>
T atomicUpdate(T* address, Update update)
{
    T old;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    for (;;)
    {
        T fresh = update(old);
        if (__atomic_compare_exchange(address, &old, &fresh, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        {
            return old;
        }
    }
}

} // namespace trtllm_kvmap::emulator
