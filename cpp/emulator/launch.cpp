#include "emulator/launch.h"

#include "emulator/cluster.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

namespace trtllm_kvmap::emulator
{

namespace
{

Statistics gTotals;
std::mutex gTotalsMutex;

void add(Statistics& sum, Statistics const& part)
{
    sum.mma += part.mma;
    sum.ldmatrix += part.ldmatrix;
    sum.ldmatrixBankConflicts += part.ldmatrixBankConflicts;
    sum.asyncCopies += part.asyncCopies;
    sum.barriers += part.barriers;
    sum.wgmma += part.wgmma;
    sum.tensorCopies += part.tensorCopies;
    sum.switches += part.switches;
}

std::string refusal(dim3 grid, std::uint32_t cluster, dim3 block, std::size_t sharedBytes)
{
    std::uint64_t const threads = static_cast<std::uint64_t>(block.x) * block.y * block.z;
    if (threads == 0 || threads % kWARP != 0 || threads > kMAX_THREADS)
    {
        return "A block of " + std::to_string(threads) + " threads was asked for; it must be whole warps, at most "
            + std::to_string(kMAX_THREADS) + " threads.";
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
    {
        return "A grid of (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " + std::to_string(grid.z)
            + ") blocks was asked for; every side must be at least 1, y and z at most 65535.";
    }
    if (cluster == 0 || cluster > kMAX_CLUSTER || grid.x % cluster != 0)
    {
        return "Clusters of " + std::to_string(cluster) + " blocks were asked for in a grid " + std::to_string(grid.x)
            + " wide; a cluster has 1 to " + std::to_string(kMAX_CLUSTER) + " blocks, and divides the grid.";
    }
    if (sharedBytes > kMAX_SHARED)
    {
        return std::to_string(sharedBytes) + " bytes of shared memory were asked for; a block has at most "
            + std::to_string(kMAX_SHARED) + ".";
    }
    return {};
}

//! The order of the clusters is as free as that of the threads.
std::vector<std::uint64_t> clusterOrder(Options const& options, std::uint64_t numClusters)
{
    std::vector<std::uint64_t> order(numClusters);
    std::iota(order.begin(), order.end(), 0);
    if (options.order == ThreadOrder::kREVERSE)
    {
        std::reverse(order.begin(), order.end());
    }
    else if (options.order == ThreadOrder::kRANDOM)
    {
        std::shuffle(order.begin(), order.end(), std::mt19937_64(options.seed));
    }
    return order;
}

} // namespace

Options& currentOptions()
{
    static Options sOptions;
    return sOptions;
}

Statistics totalStatistics()
{
    std::lock_guard<std::mutex> const lock(gTotalsMutex);
    return gTotals;
}

Report launchGrid(Options const& options, dim3 grid, std::uint32_t cluster, dim3 block, std::size_t sharedBytes,
    void (*body)(void const* arguments), void const* arguments)
{
    Report report;
    report.error = refusal(grid, cluster, block, sharedBytes);
    if (!report.ok())
    {
        return report;
    }
    auto const order = clusterOrder(options, static_cast<std::uint64_t>(grid.x) / cluster * grid.y * grid.z);
    std::atomic<std::size_t> nextCluster { 0 };
    std::mutex reportMutex;
    auto const work = [&]
    {
        Cluster worker(options, grid, cluster, block, sharedBytes, body, arguments);
        std::string error;
        for (std::size_t i = 0; error.empty() && (i = nextCluster++) < order.size();)
        {
            error = worker.run(order[i]);
        }
        std::lock_guard<std::mutex> const lock(reportMutex);
        if (!error.empty())
        {
            nextCluster = order.size();
            report.error = report.ok() ? error : report.error;
        }
        add(report.statistics, worker.statistics);
    };
    if (options.hostThreads <= 1)
    {
        work();
    }
    else
    {
        std::vector<std::thread> workers;
        for (int i = 0; i < options.hostThreads; ++i)
        {
            workers.emplace_back(work);
        }
        for (auto& worker : workers)
        {
            worker.join();
        }
    }
    std::lock_guard<std::mutex> const lock(gTotalsMutex);
    add(gTotals, report.statistics);
    return report;
}

} // namespace trtllm_kvmap::emulator

// ---- For tests that load a shared object from Python ---------------------------------------------------------------

extern "C" void trtllmKvMapEmulatorConfigure(int order, int asyncCopies, int path, std::uint64_t seed, int hostThreads)
{
    using namespace trtllm_kvmap::emulator;
    currentOptions() = Options { static_cast<ThreadOrder>(order), static_cast<AsyncCopies>(asyncCopies),
        static_cast<KernelPath>(path), seed, hostThreads };
}

//! The counts of all launches so far, in the order of Statistics.
extern "C" void trtllmKvMapEmulatorStatistics(std::uint64_t* counts)
{
    static_assert(sizeof(trtllm_kvmap::emulator::Statistics) == 8 * sizeof(std::uint64_t), "Eight counts.");
    auto const totals = trtllm_kvmap::emulator::totalStatistics();
    std::memcpy(counts, &totals, sizeof(totals));
}
