// emulator_gemm.cu as a program, for sanitizers: emulator_gemm_main <bug> <seed>. What it computes is not looked at.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <vector>

extern "C" char const* runGemm(int bug, __nv_bfloat16 const* a, __nv_bfloat16 const* b, float* c, int m, int n, int k);
extern "C" void trtllmKvMapEmulatorConfigure(int order, int asyncCopies, int path, std::uint64_t seed, int hostThreads);

int main(int, char** arguments)
{
    constexpr int kM = 100;
    constexpr int kN = 64;
    constexpr int kK = 128;
    std::vector<__nv_bfloat16> const a(kM * kK, __float2bfloat16(1.F));
    std::vector<__nv_bfloat16> const b(kK * kN, __float2bfloat16(1.F));
    std::vector<float> c(kM * kN);
    trtllmKvMapEmulatorConfigure(0, 0, 0, std::strtoull(arguments[2], nullptr, 10), 1);
    char const* const error = runGemm(std::atoi(arguments[1]), a.data(), b.data(), c.data(), kM, kN, kK);
    std::puts(error == nullptr ? "ran" : error);
    return error == nullptr ? 0 : 1;
}
