// wgmma: products of a warpgroup (four warps), asynchronous until the wait.

#include "emulator/block.h"
#include "emulator/hopper.h"
#include "emulator/sanitizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace trtllm_kvmap::emulator
{

namespace
{

constexpr int kTHREADS = 128;
constexpr int kM = 64;
constexpr int kK = 16;
constexpr std::uint64_t kSWIZZLE_128 = 1;

struct Operands
{
    WarpgroupProduct product;
    float* accumulators;
    std::uint32_t const* aRegisters;
    bool addToD;
    bool atIssue;
};

float element(MmaType type, std::uint16_t bits)
{
    if (type == MmaType::kBF16)
    {
        std::uint32_t const word = static_cast<std::uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &word, sizeof(value));
        return value;
    }
    _Float16 value;
    std::memcpy(&value, &bits, sizeof(value));
    return static_cast<float>(value);
}

//! Element (row, k) of a K-major operand: groups of eight rows, 128 bytes a row, lie a stride apart; address bits 4-6
//! are swizzled by bits 7-9. Descriptors count in 16 bytes.
float fromShared(MmaType type, std::uint64_t descriptor, int row, int k)
{
    if (descriptor >> 62 != kSWIZZLE_128)
    {
        fail("wgmma: descriptor %016llx has no 128-byte swizzle, the only one modelled",
            static_cast<unsigned long long>(descriptor));
    }
    auto const start = static_cast<std::uint32_t>(descriptor & 0x3fff) << 4;
    auto const stride = static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    std::uint32_t address = start + static_cast<std::uint32_t>(row / 8) * stride
        + static_cast<std::uint32_t>(row % 8) * 128 + static_cast<std::uint32_t>(k) * 2;
    address ^= (address >> 7 & 7) << 4;
    std::uint16_t bits;
    std::memcpy(&bits, sharedBytes(address, 2, 2, "wgmma"), sizeof(bits));
    return element(type, bits);
}

//! Row and first column of accumulators 4 j and 4 j + 1 of a thread; 4 j + 2 and 4 j + 3 are eight rows below.
int accumulatorRow(int thread)
{
    return thread / 32 * 16 + thread % 32 / 4;
}

int accumulatorColumn(int thread, int j)
{
    return j * 8 + thread % 4 * 2;
}

void multiply(Block& block, WarpgroupProduct& product)
{
    int const columns = product.columns;
    std::vector<float> b(static_cast<std::size_t>(kK * columns));
    for (int k = 0; k < kK; ++k)
    {
        for (int column = 0; column < columns; ++column)
        {
            b[static_cast<std::size_t>(k * columns + column)] = fromShared(product.type, product.b, column, k);
        }
    }
    for (int row = 0; row < kM; ++row)
    {
        float* const d = product.d.data() + row * columns;
        for (int k = 0; k < kK; ++k)
        {
            float const left = product.aValues.empty() ? fromShared(product.type, product.a, row, k)
                                                       : product.aValues[static_cast<std::size_t>(row * kK + k)];
            for (int column = 0; column < columns; ++column)
            {
                d[column] += left * b[static_cast<std::size_t>(k * columns + column)];
            }
        }
    }
    ++block.statistics().wgmma;
}

void store(WarpgroupProduct const& product)
{
    for (int thread = 0; thread < kTHREADS; ++thread)
    {
        float* const d = product.accumulators[thread];
        for (int j = 0; j < product.columns / 8; ++j)
        {
            for (int e = 0; e < 4; ++e)
            {
                int const row = accumulatorRow(thread) + e / 2 * 8;
                int const column = accumulatorColumn(thread, j) + e % 2;
                d[j * 4 + e] = product.d[static_cast<std::size_t>(row * product.columns + column)];
            }
        }
    }
}

void issue(Block& block, Thread* threads)
{
    auto const& first = *static_cast<Operands*>(threads[0].operands);
    auto& queue = block.warpgroup(threads[0]).products;
    WarpgroupProduct product = first.product;
    bool chained = false; // to a product in flight, whose result this one adds to
    for (int thread = 0; thread < kTHREADS; ++thread)
    {
        auto const& own = *static_cast<Operands*>(threads[thread].operands);
        if (own.product.a != product.a || own.product.b != product.b || own.product.columns != product.columns
            || own.product.type != product.type || own.addToD != first.addToD)
        {
            fail("wgmma: the threads of a warpgroup give different descriptors or shapes");
        }
        product.accumulators[thread] = own.accumulators;
    }
    for (auto const& pending : queue)
    {
        chained = chained || pending.accumulators[0] == product.accumulators[0];
    }
    product.chained = chained && first.addToD;
    product.d.assign(static_cast<std::size_t>(kM * product.columns), 0.F);
    for (int thread = 0; thread < kTHREADS; ++thread)
    {
        auto const& own = *static_cast<Operands*>(threads[thread].operands);
        int const row0 = accumulatorRow(thread);
        for (int i = 0; i < product.columns / 2 && first.addToD && !chained; ++i)
        {
            int const row = row0 + i % 4 / 2 * 8;
            int const column = accumulatorColumn(thread, i / 4) + i % 2;
            product.d[static_cast<std::size_t>(row * product.columns + column)] = own.accumulators[i];
        }
        if (own.aRegisters != nullptr)
        {
            product.aValues.resize(kM * kK);
            for (int i = 0; i < 8; ++i) // the A fragment of mma.m16n8k16, per warp
            {
                int const row = row0 + i % 4 / 2 * 8;
                int const k = thread % 4 * 2 + i % 2 + i / 4 * 8;
                auto const bits = static_cast<std::uint16_t>(own.aRegisters[i / 2] >> (16 * (i % 2)));
                product.aValues[static_cast<std::size_t>(row * kK + k)] = element(product.type, bits);
            }
        }
    }
    if (first.atIssue || block.options().asyncCopies == AsyncCopies::kAT_ISSUE)
    {
        multiply(block, product);
        store(product);
        return;
    }
    for (int thread = 0; thread < kTHREADS; ++thread)
    {
        // Registers of a product in flight hold nothing that may be read.
        std::fill_n(product.accumulators[thread], product.columns / 2, std::numeric_limits<float>::quiet_NaN());
    }
    product.group = block.warpgroup(threads[0]).openGroup;
    queue.push_back(std::move(product));
}

void commit(Block& block, Thread* threads)
{
    ++block.warpgroup(threads[0]).openGroup;
}

void wait(Block& block, Thread* threads)
{
    auto& group = block.warpgroup(threads[0]);
    int const pendingGroups = *static_cast<int*>(threads[0].operands);
    auto& queue = group.products;
    while (!queue.empty() && static_cast<std::int64_t>(queue.front().group) < group.openGroup - pendingGroups)
    {
        WarpgroupProduct product = std::move(queue.front());
        queue.pop_front();
        multiply(block, product);
        auto const next = std::find_if(queue.begin(), queue.end(),
            [&](auto const& later) { return later.accumulators[0] == product.accumulators[0]; });
        if (next == queue.end())
        {
            store(product);
        }
        else if (next->chained)
        {
            next->d = product.d;
        }
    }
}

} // namespace

void warpgroupMultiply(MmaType type, int columns, float* accumulators, std::uint64_t a, std::uint32_t const* aRegisters,
    std::uint64_t b, bool addToD, bool atIssue)
{
    if (columns < 8 || columns > 256 || columns % 8 != 0)
    {
        fail("wgmma: %d columns; a multiple of 8 up to 256 is needed", columns);
    }
    Operands operands {};
    operands.product.type = type;
    operands.product.columns = columns;
    operands.product.a = aRegisters == nullptr ? a : 0;
    operands.product.b = b;
    operands.accumulators = accumulators;
    operands.aRegisters = aRegisters;
    operands.addToD = addToD;
    operands.atIssue = atIssue;
    Block::current()->gather(Collective::kWGMMA, kTHREADS, &operands, issue);
}

void commitWarpgroup()
{
    Block::current()->gather(Collective::kWGMMA_COMMIT, kTHREADS, nullptr, commit);
}

void waitWarpgroup(int pendingGroups)
{
    Block::current()->gather(Collective::kWGMMA_WAIT, kTHREADS, &pendingGroups, wait);
}

} // namespace trtllm_kvmap::emulator
