// ldmatrix and mma.sync: the fragments of a warp become matrices, and matrices fragments.

#include "emulator/block.h"
#include "emulator/cudaEmulator.h"
#include "emulator/sanitizer.h"
#include "emulator/warp.h"

#include <cstring>

namespace trtllm_kvmap::emulator
{

namespace
{

// ---- ldmatrix -----------------------------------------------------------------------------------------------------

constexpr int kMATRICES = 4;
constexpr int kROWS = 8;
constexpr int kROW_BYTES = 16;

struct LoadOperands
{
    std::uint32_t* destination;
    unsigned char const* row;
    std::uint32_t address;
};

//! Cycles beyond the first that the eight rows of a matrix cost: rows in the same 16 bytes of the 128-byte bank line,
//! at different addresses, wait for each other.
unsigned bankConflicts(Thread const* lanes)
{
    unsigned worst = 1;
    unsigned used[kROWS] {};
    for (int row = 0; row < kROWS; ++row)
    {
        std::uint32_t const address = static_cast<LoadOperands const*>(lanes[row].operands)->address;
        bool repeated = false;
        for (int other = 0; other < row; ++other)
        {
            repeated |= static_cast<LoadOperands const*>(lanes[other].operands)->address == address;
        }
        if (!repeated)
        {
            unsigned const count = ++used[address / kROW_BYTES % kROWS];
            worst = count > worst ? count : worst;
        }
    }
    return worst - 1;
}

template <bool kTRANSPOSED>
void executeLoad(Block& block, Thread* lanes)
{
    std::uint16_t matrices[kMATRICES][kROWS][kROWS];
    ++block.statistics().ldmatrix;
    for (int matrix = 0; matrix < kMATRICES; ++matrix)
    {
        for (int row = 0; row < kROWS; ++row)
        {
            auto const& operands = *static_cast<LoadOperands const*>(lanes[matrix * kROWS + row].operands);
            std::memcpy(matrices[matrix][row], operands.row, kROW_BYTES);
        }
        block.statistics().ldmatrixBankConflicts += bankConflicts(lanes + matrix * kROWS);
    }
    for (int lane = 0; lane < kWARP; ++lane)
    {
        std::uint32_t* const destination = static_cast<LoadOperands*>(lanes[lane].operands)->destination;
        int const major = lane / 4;
        int const minor = lane % 4 * 2;
        for (int matrix = 0; matrix < kMATRICES; ++matrix)
        {
            auto const& m = matrices[matrix];
            std::uint32_t const low = kTRANSPOSED ? m[minor][major] : m[major][minor];
            std::uint32_t const high = kTRANSPOSED ? m[minor + 1][major] : m[major][minor + 1];
            destination[matrix] = low | (high << 16);
        }
    }
}

// ---- mma ----------------------------------------------------------------------------------------------------------

constexpr int kM = 16;
constexpr int kN = 8;
constexpr int kK = 16;

struct MmaOperands
{
    float* accumulators;
    std::uint32_t const* a;
    std::uint32_t b[2];
};

template <MmaType kTYPE>
float element(std::uint32_t pair, int half)
{
    std::uint16_t const bits = static_cast<std::uint16_t>(pair >> (16 * half));
    if constexpr (kTYPE == MmaType::kBF16)
    {
        std::uint32_t const word = static_cast<std::uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &word, sizeof(value));
        return value;
    }
    else
    {
        _Float16 value;
        std::memcpy(&value, &bits, sizeof(value));
        return static_cast<float>(value);
    }
}

template <MmaType kTYPE>
void executeMma(Block& block, Thread* lanes)
{
    alignas(64) float a[kM][kK];
    alignas(64) float b[kK][kN];
    alignas(64) float d[kM][kN];
    ++block.statistics().mma;
    for (int lane = 0; lane < kWARP; ++lane)
    {
        auto const& operands = *static_cast<MmaOperands const*>(lanes[lane].operands);
        int const group = lane / 4;
        int const pair = lane % 4 * 2;
        for (int half = 0; half < 2; ++half)
        {
            a[group][pair + half] = element<kTYPE>(operands.a[0], half);
            a[group + 8][pair + half] = element<kTYPE>(operands.a[1], half);
            a[group][pair + 8 + half] = element<kTYPE>(operands.a[2], half);
            a[group + 8][pair + 8 + half] = element<kTYPE>(operands.a[3], half);
            b[pair + half][group] = element<kTYPE>(operands.b[0], half);
            b[pair + 8 + half][group] = element<kTYPE>(operands.b[1], half);
            d[group][pair + half] = operands.accumulators[half];
            d[group + 8][pair + half] = operands.accumulators[2 + half];
        }
    }
    // A product of two 16-bit floats is exact in float32, so fused or not makes no difference.
    for (int row = 0; row < kM; ++row)
    {
        for (int k = 0; k < kK; ++k)
        {
            float const left = a[row][k];
            for (int column = 0; column < kN; ++column)
            {
                d[row][column] += left * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < kWARP; ++lane)
    {
        float* const accumulators = static_cast<MmaOperands*>(lanes[lane].operands)->accumulators;
        int const group = lane / 4;
        int const pair = lane % 4 * 2;
        accumulators[0] = d[group][pair];
        accumulators[1] = d[group][pair + 1];
        accumulators[2] = d[group + 8][pair];
        accumulators[3] = d[group + 8][pair + 1];
    }
}

} // namespace

void loadMatrix(std::uint32_t (&destination)[4], std::uint32_t address, bool transposed)
{
    char const* const instruction = transposed ? "ldmatrix.trans" : "ldmatrix";
    unsigned char const* const row = sharedBytes(address, kROW_BYTES, kROW_BYTES, instruction);
    noteRead(row, kROW_BYTES);
    LoadOperands operands { destination, row, address };
    Block::current()->gather(transposed ? Collective::kLDMATRIX_TRANS : Collective::kLDMATRIX, kWARP, &operands,
        transposed ? executeLoad<true> : executeLoad<false>);
}

void multiplyAccumulate(
    MmaType type, float (&accumulators)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1)
{
    MmaOperands operands { accumulators, a, { b0, b1 } };
    bool const bf16 = type == MmaType::kBF16;
    Block::current()->gather(bf16 ? Collective::kMMA_BF16 : Collective::kMMA_FP16, kWARP, &operands,
        bf16 ? executeMma<MmaType::kBF16> : executeMma<MmaType::kFP16>);
}

std::uint32_t multiplyPair(MmaType type, std::uint32_t a, std::uint32_t b)
{
    bool const bf16 = type == MmaType::kBF16;
    std::uint32_t product = 0;
    for (int half = 0; half < 2; ++half)
    {
        // In float64 the product is exact.
        double const exact = bf16 ? double{element<MmaType::kBF16>(a, half)} * element<MmaType::kBF16>(b, half)
                                  : double{element<MmaType::kFP16>(a, half)} * element<MmaType::kFP16>(b, half);
        std::uint32_t const bits = bf16 ? __nv_bfloat16_raw(__double2bfloat16(exact)).x
                                        : __half_raw(__double2half(exact)).x;
        product |= bits << (16 * half);
    }
    return product;
}

} // namespace trtllm_kvmap::emulator
