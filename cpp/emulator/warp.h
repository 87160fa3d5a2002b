#pragma once

// What the 32 lanes of a warp do together. All of it needs the whole warp: lanes at different operations, or a mask
// that leaves lanes out, are errors.

#include "emulator/thread.h"

#include <cstdint>
#include <cstring>

namespace trtllm_kvmap::emulator
{

void syncWarp(unsigned mask);

enum class Shuffle : int
{
    kINDEX,
    kUP,
    kDOWN,
    kXOR,
};

//! shfl.sync of 32 bits. \p width is a power of two up to 32.
std::uint32_t shuffleWord(unsigned mask, std::uint32_t value, Shuffle kind, int operand, int width);

template <typename T>
T shuffle(unsigned mask, T value, Shuffle kind, int operand, int width)
{
    static_assert(sizeof(T) % 4 == 0 || sizeof(T) == 2, "A shuffle moves 2 bytes or whole 32-bit words.");
    std::uint32_t words[(sizeof(T) + 3) / 4] {};
    std::memcpy(words, &value, sizeof(T));
    for (auto& word : words)
    {
        word = shuffleWord(mask, word, kind, operand, width);
    }
    std::memcpy(&value, words, sizeof(T));
    return value;
}

//! Bit i: the predicate of lane i.
unsigned ballot(unsigned mask, bool predicate);

//! ldmatrix.m8n8.x4.b16: lane i gives the shared address of row i % 8 of matrix i / 8; 16-byte aligned.
void loadMatrix(std::uint32_t (&destination)[4], std::uint32_t address, bool transposed);

enum class MmaType : int
{
    kBF16,
    kFP16,
};

//! mma.m16n8k16.row.col, float32 accumulators, summed in the order of k: D = A B + D.
void multiplyAccumulate(
    MmaType type, float (&accumulators)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1);

//! The products of two pairs of bf16 or fp16, each rounded once.
std::uint32_t multiplyPair(MmaType type, std::uint32_t a, std::uint32_t b);

//! cp.async.cg of 16 bytes; zeros when not \p valid, and \p source is then not read.
void asyncCopy16(std::uint32_t destination, void const* source, bool valid);
void asyncCommit();

//! The ignore-source size of a cp.async of 16 bytes as a predicate: only 16 and 0 are modelled.
bool wholeOrNothing(std::uint32_t sourceBytes);

//! cp.async.wait_group: all but the newest \p pendingGroups groups of this thread have arrived.
void asyncWait(int pendingGroups);

} // namespace trtllm_kvmap::emulator
