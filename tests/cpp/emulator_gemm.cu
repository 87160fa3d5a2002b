// A small matrix product with everything the kernels are made of: a ring of cp.async stages, swizzled tiles, ldmatrix,
// mma, an epilogue. And the same with one mistake each: the emulator must find them all.

#include "kernels/launchKernel.cuh"

namespace gemm
{

using namespace trtllm_kvmap::kernels;

enum class Bug : int
{
    kNONE,
    kNO_BARRIER_AFTER_WAIT, //!< other threads' copies are read before they are visible
    kWAIT_COUNT, //!< wait_group leaves the stage that is read next in flight
    kLOAD_BEFORE_BARRIER, //!< a stage is filled while other warps still read it
    kREAD_BEFORE_WAIT, //!< the fragments are loaded before the wait
    kFRAGMENT, //!< two registers of B swapped
    kSWIZZLE, //!< written with one swizzle, read with another
    kNO_DRAIN, //!< copies in flight at the end
    kEPILOGUE_ROW, //!< the lower half of the rows goes to the wrong rows
    kSHARED_ROWS, //!< two blocks write the same row of C
    kPAST_SHARED, //!< a store past the end of shared memory
};

constexpr int kNUM_BUGS = 11;
constexpr int kTILE = 64; // of C, both ways
constexpr int kDEPTH = 32;
constexpr int kSTAGES = 3;
constexpr int kTHREADS = 128;
constexpr int kA_BYTES = kTILE * kDEPTH * 2;
constexpr int kB_BYTES = kDEPTH * kTILE * 2;
constexpr int kSTAGE_BYTES = kA_BYTES + kB_BYTES;

struct Params
{
    __nv_bfloat16 const* a; //!< [m][k]
    __nv_bfloat16 const* b; //!< [k][n]
    float* c; //!< [m][n]
    int m;
    int n;
    int k; //!< multiple of kDEPTH; m and n are free, n a multiple of 8
};

//! Byte offset of 16-byte chunk \p chunk of row \p row of a tile with \p kCHUNKS chunks a row: eight consecutive rows
//! of one chunk fall into eight different bank groups.
template <int kCHUNKS>
__device__ __forceinline__ std::uint32_t swizzled(int row, int chunk, bool broken = false)
{
    constexpr int kROWS_PER_LINE = 8 / kCHUNKS; // a line of banks holds 8 chunks
    int const turn = row / kROWS_PER_LINE % kCHUNKS;
    return static_cast<std::uint32_t>((row * kCHUNKS + (chunk ^ (broken ? turn ^ 1 : turn))) * 16);
}

template <Bug kBUG>
__device__ __forceinline__ void loadStage(Params const& p, std::uint32_t stage, int row0, int column0, int depth0)
{
    for (int i = static_cast<int>(threadIdx.x); i < kTILE * 4; i += kTHREADS)
    {
        int const row = i / 4;
        int const chunk = i % 4;
        bool const valid = row0 + row < p.m;
        cpAsync16(stage + swizzled<4>(row, chunk),
            p.a + static_cast<std::size_t>(valid ? row0 + row : 0) * p.k + depth0 + chunk * 8, valid);
    }
    for (int i = static_cast<int>(threadIdx.x); i < kDEPTH * 8; i += kTHREADS)
    {
        int const row = i / 8;
        int const chunk = i % 8;
        bool const valid = column0 + chunk * 8 < p.n;
        cpAsync16(stage + kA_BYTES + swizzled<8>(row, chunk, kBUG == Bug::kSWIZZLE),
            p.b + static_cast<std::size_t>(depth0 + row) * p.n + (valid ? column0 + chunk * 8 : 0), valid);
    }
}

template <Bug kBUG>
__device__ __forceinline__ void multiplyStage(float (&d)[8][4], std::uint32_t stage, int warp, int lane)
{
#pragma unroll
    for (int step = 0; step < kDEPTH / 16; ++step)
    {
        std::uint32_t a[4];
        ldmatrixX4(a, stage + swizzled<4>(warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; ++j)
        {
            std::uint32_t b[4];
            ldmatrixX4Trans(b, stage + kA_BYTES + swizzled<8>(step * 16 + lane % 16, j * 2 + lane / 16));
            constexpr int kSECOND = kBUG == Bug::kFRAGMENT ? 2 : 1;
            mmaM16N8K16<__nv_bfloat16>(d[2 * j], a, b[0], b[kSECOND]);
            mmaM16N8K16<__nv_bfloat16>(d[2 * j + 1], a, b[3 - kSECOND], b[3]);
        }
    }
}

template <Bug kBUG>
__global__ void __launch_bounds__(kTHREADS) gemmKernel(Params p)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    std::uint32_t const base = sharedAddress(shared);
    int const warp = static_cast<int>(threadIdx.x) / 32;
    int const lane = static_cast<int>(threadIdx.x) % 32;
    int const row0 = static_cast<int>(blockIdx.x) * kTILE;
    int const column0 = static_cast<int>(blockIdx.y) * kTILE;
    int const numSteps = p.k / kDEPTH;
    auto const load = [&](int step)
    {
        if (step < numSteps || kBUG == Bug::kNO_DRAIN)
        {
            loadStage<kBUG>(p, base + static_cast<std::uint32_t>(step % kSTAGES * kSTAGE_BYTES), row0, column0,
                step % numSteps * kDEPTH);
        }
        cpAsyncCommit(); // empty at the end, so that the count of the wait is always the same
    };
    for (int step = 0; step < kSTAGES - 1; ++step)
    {
        load(step);
    }
    float d[8][4] {};
    for (int step = 0; step < numSteps; ++step)
    {
        std::uint32_t const stage = base + static_cast<std::uint32_t>(step % kSTAGES * kSTAGE_BYTES);
        if (kBUG == Bug::kREAD_BEFORE_WAIT)
        {
            multiplyStage<kBUG>(d, stage, warp, lane);
        }
        if (kBUG == Bug::kLOAD_BEFORE_BARRIER)
        {
            load(step + kSTAGES - 1);
            cpAsyncWait<kSTAGES - 1>();
            __syncthreads();
        }
        else
        {
            cpAsyncWait<kBUG == Bug::kWAIT_COUNT ? kSTAGES - 1 : kSTAGES - 2>();
            if (kBUG != Bug::kNO_BARRIER_AFTER_WAIT)
            {
                __syncthreads(); // also: everyone has read the stage that is filled next
            }
            load(step + kSTAGES - 1);
        }
        if (kBUG != Bug::kREAD_BEFORE_WAIT)
        {
            multiplyStage<kBUG>(d, stage, warp, lane);
        }
    }
    if (kBUG != Bug::kNO_DRAIN)
    {
        cpAsyncWait<0>();
    }
    if (kBUG == Bug::kPAST_SHARED)
    {
        shared[kSTAGES * kSTAGE_BYTES + static_cast<int>(threadIdx.x)] = 0;
    }
    for (int half = 0; half < 2; ++half)
    {
        int const low = warp * 16 + lane / 4;
        int row = row0 + low + (kBUG == Bug::kEPILOGUE_ROW ? half * 8 ^ 8 : half * 8);
        if (kBUG == Bug::kSHARED_ROWS && low + half * 8 == 0)
        {
            row = 0;
        }
        if (row >= p.m)
        {
            continue;
        }
        for (int j = 0; j < 8; ++j)
        {
            int const column = column0 + j * 8 + lane % 4 * 2;
            if (column < p.n)
            {
                *reinterpret_cast<float2*>(p.c + static_cast<std::size_t>(row) * p.n + column)
                    = float2 { d[j][half * 2], d[j][half * 2 + 1] };
            }
        }
    }
}

} // namespace gemm

extern "C" char const* runGemm(int bug, __nv_bfloat16 const* a, __nv_bfloat16 const* b, float* c, int m, int n, int k)
{
    using gemm::Bug;
    void (*const kernels[gemm::kNUM_BUGS])(gemm::Params)
        = { gemm::gemmKernel<Bug::kNONE>, gemm::gemmKernel<Bug::kNO_BARRIER_AFTER_WAIT>,
              gemm::gemmKernel<Bug::kWAIT_COUNT>, gemm::gemmKernel<Bug::kLOAD_BEFORE_BARRIER>,
              gemm::gemmKernel<Bug::kREAD_BEFORE_WAIT>, gemm::gemmKernel<Bug::kFRAGMENT>,
              gemm::gemmKernel<Bug::kSWIZZLE>, gemm::gemmKernel<Bug::kNO_DRAIN>, gemm::gemmKernel<Bug::kEPILOGUE_ROW>,
              gemm::gemmKernel<Bug::kSHARED_ROWS>, gemm::gemmKernel<Bug::kPAST_SHARED> };
    dim3 const grid(static_cast<unsigned>((m + gemm::kTILE - 1) / gemm::kTILE),
        static_cast<unsigned>((n + gemm::kTILE - 1) / gemm::kTILE));
    return gemm::launchKernel(kernels[bug], grid, dim3(gemm::kTHREADS), gemm::kSTAGES * gemm::kSTAGE_BYTES, nullptr,
        gemm::Params { a, b, c, m, n, k });
}
