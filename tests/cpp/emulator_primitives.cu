// Kernels of one primitive each, called from Python through C functions. Every function returns nullptr or what went
// wrong, as launchKernel does.

#include "kernels/launchKernel.cuh"

namespace
{

using namespace trtllm_kvmap::kernels;

constexpr int kWARP = 32;
constexpr std::size_t kNO_SHARED = 0;

} // namespace

// ---- mma ----------------------------------------------------------------------------------------------------------

//! Registers as they are: a [32][4], b [32][2], d [32][4], by lane.
template <typename T>
__global__ void mmaKernel(std::uint32_t const* a, std::uint32_t const* b, float* d)
{
    int const lane = static_cast<int>(threadIdx.x);
    std::uint32_t left[4];
    float accumulators[4];
    for (int i = 0; i < 4; ++i)
    {
        left[i] = a[lane * 4 + i];
        accumulators[i] = d[lane * 4 + i];
    }
    mmaM16N8K16<T>(accumulators, left, b[lane * 2], b[lane * 2 + 1]);
    for (int i = 0; i < 4; ++i)
    {
        d[lane * 4 + i] = accumulators[i];
    }
}

extern "C" char const* runMma(bool bf16, std::uint32_t const* a, std::uint32_t const* b, float* d)
{
    return launchKernel(
        bf16 ? mmaKernel<__nv_bfloat16> : mmaKernel<__half>, dim3(1), dim3(kWARP), kNO_SHARED, nullptr, a, b, d);
}

// ---- ldmatrix -----------------------------------------------------------------------------------------------------

//! Lane i loads from byte offsets[i] of \p bytes copied to shared memory; words [32][4].
__global__ void ldmatrixKernel(
    bool transposed, unsigned char const* bytes, int numBytes, int const* offsets, std::uint32_t* words)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    int const lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < numBytes; i += kWARP)
    {
        shared[i] = bytes[i];
    }
    __syncwarp();
    std::uint32_t fragment[4];
    std::uint32_t const address = sharedAddress(shared) + static_cast<std::uint32_t>(offsets[lane]);
    if (transposed)
    {
        ldmatrixX4Trans(fragment, address);
    }
    else
    {
        ldmatrixX4(fragment, address);
    }
    for (int i = 0; i < 4; ++i)
    {
        words[lane * 4 + i] = fragment[i];
    }
}

extern "C" char const* runLdmatrix(
    bool transposed, unsigned char const* bytes, int numBytes, int const* offsets, std::uint32_t* words)
{
    return launchKernel(ldmatrixKernel, dim3(1), dim3(kWARP), static_cast<std::size_t>(numBytes), nullptr, transposed,
        bytes, numBytes, offsets, words);
}

// ---- cp.async -----------------------------------------------------------------------------------------------------

//! Each thread copies three words of 16 bytes in three groups, waits for all but \p kPENDING groups, and writes what
//! it then finds: out [3][32][4]. The copy of a thread with valid 0 fills with zeros. \p kDRAIN: wait before the end.
template <int kPENDING, bool kDRAIN>
__global__ void cpAsyncKernel(std::uint32_t const* in, int const* valid, std::uint32_t* out)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    int const lane = static_cast<int>(threadIdx.x);
    auto const* words = reinterpret_cast<std::uint32_t const*>(shared);
    for (int group = 0; group < 3; ++group)
    {
        int const word = group * kWARP + lane;
        cpAsync16(sharedAddress(shared) + static_cast<std::uint32_t>(word) * 16, in + word * 4, valid[lane] != 0);
        cpAsyncCommit();
    }
    cpAsyncWait<kPENDING>();
    for (int group = 0; group < 3; ++group)
    {
        for (int i = 0; i < 4; ++i)
        {
            int const word = (group * kWARP + lane) * 4 + i;
            out[word] = words[word];
        }
    }
    if (kDRAIN)
    {
        cpAsyncWait<0>();
    }
}

extern "C" char const* runCpAsync(
    int pending, bool drain, std::uint32_t const* in, int const* valid, std::uint32_t* out)
{
    void (*const kernels[])(std::uint32_t const*, int const*, std::uint32_t*)
        = { cpAsyncKernel<0, true>, cpAsyncKernel<1, true>, cpAsyncKernel<2, true>, cpAsyncKernel<3, true> };
    auto* const kernel = drain ? kernels[pending] : cpAsyncKernel<1, false>;
    return launchKernel(kernel, dim3(1), dim3(kWARP), 3 * kWARP * 16, nullptr, in, valid, out);
}

// ---- warps and blocks ---------------------------------------------------------------------------------------------

//! out [5][32]: index, up, down, xor, ballot of odd values.
__global__ void shuffleKernel(int operand, int width, int const* in, int* out)
{
    int const lane = static_cast<int>(threadIdx.x);
    constexpr unsigned kALL = 0xffffffffu;
    int const value = in[lane];
    out[lane] = __shfl_sync(kALL, value, operand, width);
    out[kWARP + lane] = __shfl_up_sync(kALL, value, static_cast<unsigned>(operand), width);
    out[2 * kWARP + lane] = __shfl_down_sync(kALL, value, static_cast<unsigned>(operand), width);
    out[3 * kWARP + lane] = __shfl_xor_sync(kALL, value, operand, width);
    out[4 * kWARP + lane] = static_cast<int>(__ballot_sync(kALL, value & 1));
}

extern "C" char const* runShuffle(int operand, int width, int const* in, int* out)
{
    return launchKernel(shuffleKernel, dim3(1), dim3(kWARP), kNO_SHARED, nullptr, operand, width, in, out);
}

//! Every thread adds its index to sum[0], the largest goes to sum[1]; out[block][thread] gets the reversed index of the
//! block's threads through shared memory.
__global__ void blockKernel(int* sum, int* out)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    int const thread = static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    int const size = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
    int const block = static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    auto* words = reinterpret_cast<int*>(shared);
    words[thread] = thread;
    __syncthreads();
    out[block * size + thread] = words[size - 1 - thread];
    atomicAdd(sum, thread);
    atomicMax(sum + 1, block * size + thread);
}

extern "C" char const* runBlocks(int x, int y, int z, int threads, int* sum, int* out)
{
    return launchKernel(blockKernel, dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)),
        dim3(8, 2, static_cast<unsigned>(threads / 16)), static_cast<std::size_t>(threads) * 4, nullptr, sum, out);
}

// ---- what must be refused -----------------------------------------------------------------------------------------

enum class Mistake : int
{
    kNONE,
    kDIVERGENT_WARP, //!< half of a warp at __syncwarp, half at a shuffle
    kDEADLOCK, //!< one warp never comes to __syncthreads
    kPARTIAL_MASK, //!< a shuffle without lane 31
    kPAST_SHARED, //!< ldmatrix past the end
    kMISALIGNED_SHARED, //!< cp.async to an address that is no multiple of 16
    kMISALIGNED_GLOBAL, //!< a 16-byte load from an address that is no multiple of 16
    kSTORE_PAST_SHARED, //!< an ordinary store past the end
    kBARRIER_COUNT, //!< two counts at one barrier
    kFOREIGN_POINTER, //!< the shared address of global memory
    kUNINITIALISED, //!< not refused: reads shared memory that nobody wrote
};

__global__ void mistakeKernel(Mistake mistake, float* data)
{
    TRTLLM_KVMAP_DYNAMIC_SHARED(shared);
    int const thread = static_cast<int>(threadIdx.x);
    std::uint32_t const base = sharedAddress(shared);
    std::uint32_t words[4];
    switch (mistake)
    {
    case Mistake::kNONE:
        break;
    case Mistake::kDIVERGENT_WARP:
        if (thread % 32 < 16)
        {
            __syncwarp();
        }
        else
        {
            data[thread] = __shfl_sync(0xffffffffu, 1.F, 0);
        }
        break;
    case Mistake::kDEADLOCK:
        if (thread < 32)
        {
            __syncthreads();
        }
        break;
    case Mistake::kPARTIAL_MASK:
        data[thread] = __shfl_sync(0x7fffffffu, 1.F, 0);
        break;
    case Mistake::kPAST_SHARED:
        ldmatrixX4(words, base + 1024 - 16 * 16 + static_cast<std::uint32_t>(thread % 32) * 16);
        break;
    case Mistake::kMISALIGNED_SHARED:
        cpAsync16(base + 8, data, true);
        cpAsyncWait<0>();
        break;
    case Mistake::kMISALIGNED_GLOBAL:
        data[4] = static_cast<float>(loadGlobal16(data + 1).x);
        break;
    case Mistake::kSTORE_PAST_SHARED:
        reinterpret_cast<float*>(shared)[256 + thread] = 1.F;
        break;
    case Mistake::kBARRIER_COUNT:
#if defined(TRTLLM_KVMAP_EMULATE)
        trtllm_kvmap::emulator::syncBarrier(1, thread < 32 ? 32 : 64);
#endif
        break;
    case Mistake::kFOREIGN_POINTER:
        data[0] = static_cast<float>(sharedAddress(data));
        break;
    case Mistake::kUNINITIALISED:
        data[thread] = reinterpret_cast<float*>(shared)[thread];
        break;
    }
}

extern "C" char const* runMistake(int mistake, float* data)
{
    return launchKernel(mistakeKernel, dim3(1), dim3(64), 1024, nullptr, static_cast<Mistake>(mistake), data);
}

extern "C" char const* runShape(int gridX, int threads, int sharedBytes)
{
    return launchKernel(mistakeKernel, dim3(static_cast<unsigned>(gridX)), dim3(static_cast<unsigned>(threads)),
        static_cast<std::size_t>(sharedBytes), nullptr, Mistake::kNONE, static_cast<float*>(nullptr));
}
