#pragma once

// Launching a kernel on the CPU: how its threads are ordered, what went wrong, what was counted.

#include "emulator/ptxEntry.h"
#include "emulator/thread.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

namespace trtllm_kvmap::emulator
{

//! Which of the threads that can go on does so. A kernel must be right in every order.
enum class ThreadOrder : int
{
    kRANDOM = 0, //!< any of them, drawn with the seed
    kIN_ORDER = 1, //!< the lowest thread index
    kREVERSE = 2, //!< the highest thread index
};

//! When an asynchronous copy (cp.async, TMA) takes place. Hardware may choose any moment from issue to wait.
enum class AsyncCopies : int
{
    kPOISONED = 0, //!< the destination becomes NaN at issue and is filled at the wait: both ends of the interval
    kAT_ISSUE = 1, //!< as early as possible
    kAT_WAIT = 2, //!< as late as possible; until then the old contents stay
};

//! What runs: the source as g++ compiled it, or the PTX that nvcc emitted, translated by ptxToCpp.py.
enum class KernelPath : int
{
    kSOURCE = 0,
    kPTX = 1,
};

struct Options
{
    ThreadOrder order { ThreadOrder::kRANDOM };
    AsyncCopies asyncCopies { AsyncCopies::kPOISONED };
    KernelPath path { KernelPath::kSOURCE };
    std::uint64_t seed { 1 }; //!< equal seeds give equal runs, whatever hostThreads is
    int hostThreads { 1 }; //!< blocks (clusters) run at once
};

//! What a launch did. Counts are per instruction of a whole warp (warpgroup for wgmma), not per lane.
struct Statistics
{
    std::uint64_t mma { 0 };
    std::uint64_t ldmatrix { 0 };
    std::uint64_t ldmatrixBankConflicts { 0 }; //!< extra shared-memory cycles of ldmatrix beyond one per 8x8 matrix
    std::uint64_t asyncCopies { 0 }; //!< cp.async, per thread
    std::uint64_t barriers { 0 }; //!< completed block barriers
    std::uint64_t wgmma { 0 };
    std::uint64_t tensorCopies { 0 }; //!< TMA boxes
    std::uint64_t switches { 0 }; //!< of fibers
};

//! \p error is empty, or a sentence that names the block, the thread and what is wrong.
struct Report
{
    std::string error;
    Statistics statistics;

    [[nodiscard]] bool ok() const
    {
        return error.empty();
    }
};

//! The options of launchKernel (kernels/launchKernel.cuh), which has no place for them. One for the process.
Options& currentOptions();

//! Counted over all launches of the process.
Statistics totalStatistics();

//! Run \p body(arguments) once for every thread of \p grid blocks of \p block threads. The part of launch that needs
//! no template. The block must be whole warps, at most 1024 threads; shared memory at most 227 KiB. \p cluster blocks
//! that are neighbours in x run together: at most 8, a divisor of grid.x.
Report launchGrid(Options const& options, dim3 grid, std::uint32_t cluster, dim3 block, std::size_t sharedBytes,
    void (*body)(void const* arguments), void const* arguments);

//! Run \p kernel, in place of kernel<<<grid, block, sharedBytes>>>(arguments...). Returns when it has ended.
template <typename... Params, typename... Arguments>
Report launch(Options const& options, void (*kernel)(Params...), dim3 grid, std::uint32_t cluster, dim3 block,
    std::size_t sharedBytes, Arguments&&... arguments)
{
    if (options.path == KernelPath::kPTX)
    {
        std::string error;
        PtxEntry const* entry = findPtxEntry(reinterpret_cast<void const*>(kernel), error);
        if (entry == nullptr)
        {
            return Report { error, {} };
        }
        auto const parameters = packParameters<Params...>(std::forward<Arguments>(arguments)...);
        if (parameters.size != entry->parameterBytes)
        {
            return Report { "The PTX of " + std::string(entry->name) + " takes " + std::to_string(entry->parameterBytes)
                    + " bytes of parameters; the source passes " + std::to_string(parameters.size) + ".",
                {} };
        }
        return launchGrid(options, grid, cluster, block, sharedBytes, entry->run, parameters.bytes);
    }
    struct Call
    {
        void (*kernel)(Params...);
        std::tuple<Params...> arguments;
    };
    Call const call { kernel, std::tuple<Params...>(std::forward<Arguments>(arguments)...) };
    auto const body = [](void const* opaque)
    {
        auto const* self = static_cast<Call const*>(opaque);
        std::apply(self->kernel, self->arguments);
    };
    return launchGrid(options, grid, cluster, block, sharedBytes, body, &call);
}

} // namespace trtllm_kvmap::emulator
