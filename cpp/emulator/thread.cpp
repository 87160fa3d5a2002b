#include "emulator/thread.h"

#include "emulator/cluster.h"
#include "emulator/sanitizer.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace trtllm_kvmap::emulator
{

namespace
{

Block& block()
{
    Block* const current = Block::current();
    if (current == nullptr)
    {
        std::fputs("emulator: device code was called outside a launch\n", stderr);
        std::abort();
    }
    return *current;
}

char gFence;

} // namespace

void fail(char const* format, ...)
{
    std::va_list arguments;
    va_start(arguments, format);
    Cluster& cluster = block().cluster();
    cluster.fail(cluster.running(), format, arguments);
}

unsigned char* sharedMemory()
{
    return block().shared();
}

std::uint32_t sharedAddress(void const* pointer)
{
    Block const& current = block();
    auto const* bytes = static_cast<unsigned char const*>(pointer);
    if (bytes < current.shared() || bytes > current.shared() + current.sharedBytes())
    {
        fail("a shared address was asked of a pointer that is not into the block's shared memory");
    }
    return kSHARED_BASE + static_cast<std::uint32_t>(bytes - current.shared());
}

unsigned char* sharedBytes(std::uint32_t address, std::size_t bytes, std::size_t alignment, char const* instruction)
{
    Block const& current = block();
    if (address < kSHARED_BASE || address - kSHARED_BASE + bytes > current.sharedBytes())
    {
        fail("%s: shared address %d (from the start of %zu bytes) is out of range", instruction,
            static_cast<int>(address - kSHARED_BASE), current.sharedBytes());
    }
    if (address % alignment != 0)
    {
        fail("%s: shared address %d is not aligned to %zu bytes", instruction, static_cast<int>(address - kSHARED_BASE),
            alignment);
    }
    return current.shared() + (address - kSHARED_BASE);
}

void checkGlobal(void const* pointer, std::size_t alignment, char const* instruction)
{
    if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0)
    {
        fail("%s: global address %p is not aligned to %zu bytes", instruction, pointer, alignment);
    }
}

void syncThreads()
{
    dim3 const shape = tThread->blockShape;
    block().wait(0, static_cast<int>(shape.x * shape.y * shape.z));
}

void syncBarrier(int id, int count)
{
    block().wait(id, count);
}

void arriveBarrier(int id, int count)
{
    block().arrive(id, count);
}

void arriveCluster()
{
    block().cluster().arrive();
}

void waitCluster()
{
    block().cluster().wait();
}

void threadFence()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    releaseOrder(&gFence);
    acquireOrder(&gFence);
}

} // namespace trtllm_kvmap::emulator
