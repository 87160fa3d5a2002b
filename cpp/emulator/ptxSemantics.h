#pragma once

// What single PTX instructions compute, for the C++ that ptxToCpp.py writes. A register is an unsigned integer of its
// width, whatever it holds; an instruction's type says how its bits are read.

#include "emulator/cudaEmulator.h"
#include "emulator/hopper.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace trtllm_kvmap::emulator::ptx
{

//! The bits of a register (or of an immediate) as a T. Wider registers are truncated, narrower ones are extended as T
//! is signed or not.
template <typename T, typename R>
inline T get(R value)
{
    if constexpr (std::is_floating_point_v<T>)
    {
        static_assert(sizeof(T) == sizeof(R), "A float is read from a register of its own width.");
        T result;
        std::memcpy(&result, &value, sizeof(T));
        return result;
    }
    else
    {
        return static_cast<T>(value);
    }
}

//! Put a T into a register; a register that is wider is filled by T's sign or with zeros.
template <typename R, typename T>
inline void put(R& destination, T value)
{
    if constexpr (std::is_floating_point_v<T>)
    {
        static_assert(sizeof(T) == sizeof(R), "A float is put into a register of its own width.");
        std::memcpy(&destination, &value, sizeof(T));
    }
    else
    {
        destination = static_cast<R>(value);
    }
}

// ---- Memory -------------------------------------------------------------------------------------------------------

enum class Space
{
    kGLOBAL, //!< and generic: host pointers
    kSHARED,
    kPARAM,
    kLOCAL,
};

template <Space kSPACE>
inline unsigned char* locate(std::uint64_t address, std::size_t bytes)
{
    if constexpr (kSPACE == Space::kSHARED)
    {
        return emulator::sharedBytes(static_cast<std::uint32_t>(address), bytes, bytes, "ld/st.shared");
    }
    else
    {
        auto* const pointer = reinterpret_cast<unsigned char*>(address);
        emulator::checkGlobal(pointer, bytes, "ld/st");
        return pointer;
    }
}

// The accesses go through types that may alias anything, and stay accesses of their size for the sanitizers.
template <typename T>
struct Alias
{
    using Type __attribute__((may_alias)) = T;
};

//! \p address is that of the whole vector; element \p index of \p kCOUNT.
template <typename T, Space kSPACE, int kCOUNT>
inline T load(std::uint64_t address, int index)
{
    return reinterpret_cast<typename Alias<T>::Type const*>(locate<kSPACE>(address, sizeof(T) * kCOUNT))[index];
}

template <typename T, Space kSPACE, int kCOUNT>
inline void store(std::uint64_t address, int index, T value)
{
    reinterpret_cast<typename Alias<T>::Type*>(locate<kSPACE>(address, sizeof(T) * kCOUNT))[index] = value;
}

inline std::uint64_t genericOfShared(std::uint32_t address)
{
    return reinterpret_cast<std::uint64_t>(emulator::sharedMemory()) + address - kSHARED_BASE;
}

inline std::uint64_t sharedOfGeneric(std::uint64_t address)
{
    return emulator::sharedAddress(reinterpret_cast<void const*>(address));
}

// ---- Integers -----------------------------------------------------------------------------------------------------

//! Two's complement without C++'s undefined overflow.
template <typename T>
using Unsigned = std::make_unsigned_t<T>;

template <typename T>
inline T add(T a, T b)
{
    if constexpr (std::is_integral_v<T>)
    {
        return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
    }
    else
    {
        return a + b;
    }
}

template <typename T>
inline T subtract(T a, T b)
{
    if constexpr (std::is_integral_v<T>)
    {
        return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
    }
    else
    {
        return a - b;
    }
}

//! The low half of the product (all of it, for floats).
template <typename T>
inline T multiply(T a, T b)
{
    if constexpr (std::is_integral_v<T>)
    {
        return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
    }
    else
    {
        return a * b;
    }
}

template <typename T>
inline T multiplyHigh(T a, T b)
{
    return static_cast<T>((static_cast<__int128>(a) * static_cast<__int128>(b)) >> (8 * sizeof(T)));
}

template <typename Wide, typename T>
inline Wide multiplyWide(T a, T b)
{
    return static_cast<Wide>(static_cast<__int128>(a) * static_cast<__int128>(b));
}

//! Division by zero gives all ones on hardware, but no kernel should ask for it.
template <typename T>
inline T divide(T a, T b)
{
    if constexpr (std::is_integral_v<T>)
    {
        if (b == 0)
        {
            emulator::fail("integer division by zero");
        }
        if (std::is_signed_v<T> && b == static_cast<T>(-1))
        {
            return subtract<T>(0, a);
        }
    }
    return a / b;
}

template <typename T>
inline T remainder(T a, T b)
{
    if (b == 0)
    {
        emulator::fail("integer remainder of a division by zero");
    }
    return std::is_signed_v<T> && b == static_cast<T>(-1) ? static_cast<T>(0) : static_cast<T>(a % b);
}

//! For floats the operand that is a number wins over NaN, and -0 is less than +0.
template <typename T>
inline T minimum(T a, T b)
{
    if constexpr (std::is_floating_point_v<T>)
    {
        if (std::isnan(a) || std::isnan(b))
        {
            return std::isnan(a) ? b : a;
        }
        return a == b ? (std::signbit(a) ? a : b) : (a < b ? a : b);
    }
    else
    {
        return a < b ? a : b;
    }
}

template <typename T>
inline T maximum(T a, T b)
{
    if constexpr (std::is_floating_point_v<T>)
    {
        if (std::isnan(a) || std::isnan(b))
        {
            return std::isnan(a) ? b : a;
        }
        return a == b ? (std::signbit(a) ? b : a) : (a < b ? b : a);
    }
    else
    {
        return a < b ? b : a;
    }
}

template <typename T>
inline T negate(T a)
{
    if constexpr (std::is_floating_point_v<T>)
    {
        return -a;
    }
    else
    {
        return subtract<T>(0, a);
    }
}

template <typename T>
inline T absolute(T a)
{
    if constexpr (std::is_floating_point_v<T>)
    {
        return std::fabs(a);
    }
    else
    {
        return a < 0 ? subtract<T>(0, a) : a;
    }
}

template <typename T>
inline T bitAnd(T a, T b)
{
    return static_cast<T>(a & b);
}

template <typename T>
inline T bitOr(T a, T b)
{
    return static_cast<T>(a | b);
}

template <typename T>
inline T bitXor(T a, T b)
{
    return static_cast<T>(a ^ b);
}

template <typename T>
inline T bitNot(T a)
{
    if constexpr (std::is_same_v<T, bool>)
    {
        return !a;
    }
    else
    {
        return static_cast<T>(~a);
    }
}

//! Shifts by the width and more give what shifting bit by bit gives.
template <typename T>
inline T shiftLeft(T a, std::uint32_t by)
{
    return by >= 8 * sizeof(T) ? static_cast<T>(0) : static_cast<T>(static_cast<std::uint64_t>(a) << by);
}

template <typename T>
inline T shiftRight(T a, std::uint32_t by)
{
    std::uint32_t const last = 8 * sizeof(T) - 1;
    if (by > last)
    {
        return std::is_signed_v<T> ? static_cast<T>(a >> last) : static_cast<T>(0);
    }
    return static_cast<T>(a >> by);
}

//! shf: 64 bits, high:low, shifted; the upper word (left) or the lower word (right) of the result.
inline std::uint32_t funnelLeft(std::uint32_t low, std::uint32_t high, std::uint32_t by)
{
    std::uint64_t const both = static_cast<std::uint64_t>(high) << 32 | low;
    return static_cast<std::uint32_t>((both << by) >> 32);
}

inline std::uint32_t funnelRight(std::uint32_t low, std::uint32_t high, std::uint32_t by)
{
    std::uint64_t const both = static_cast<std::uint64_t>(high) << 32 | low;
    return static_cast<std::uint32_t>(both >> by);
}

inline std::uint32_t clampShift(std::uint32_t by)
{
    return by > 32 ? 32 : by;
}

template <typename T>
inline T fieldMask(std::uint32_t length)
{
    return length >= 8 * sizeof(T) ? static_cast<T>(~static_cast<T>(0))
                                   : static_cast<T>((static_cast<T>(1) << length) - 1);
}

//! bfi: \p length bits of \p field at \p position of \p base. Position and length count modulo 256.
template <typename T>
inline T insertField(T field, T base, std::uint32_t position, std::uint32_t length)
{
    T const mask = shiftLeft<T>(fieldMask<T>(length & 255), position & 255);
    return static_cast<T>((base & ~mask) | (shiftLeft<T>(field, position & 255) & mask));
}

//! bfe: \p length bits of \p value from \p position; a signed field repeats its top bit.
template <typename T>
inline T extractField(T value, std::uint32_t position, std::uint32_t length)
{
    position &= 255;
    length &= 255;
    constexpr std::uint32_t kTOP = 8 * sizeof(T) - 1;
    if (length == 0)
    {
        return 0;
    }
    Unsigned<T> const field
        = shiftRight<Unsigned<T>>(static_cast<Unsigned<T>>(value), position) & fieldMask<Unsigned<T>>(length);
    if constexpr (std::is_signed_v<T>)
    {
        std::uint32_t const top = position + length - 1 < kTOP ? position + length - 1 : kTOP;
        bool const negative = (static_cast<Unsigned<T>>(value) >> top & 1) != 0;
        std::uint32_t const kept = position > kTOP ? 0 : top - position + 1;
        return static_cast<T>(negative ? field | static_cast<Unsigned<T>>(~fieldMask<Unsigned<T>>(kept)) : field);
    }
    else
    {
        return static_cast<T>(field);
    }
}

//! prmt: each nibble of \p selector picks one of the eight bytes of b:a, or its sign.
inline std::uint32_t permuteBytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector)
{
    std::uint64_t const bytes = static_cast<std::uint64_t>(b) << 32 | a;
    std::uint32_t result = 0;
    for (int i = 0; i < 4; ++i)
    {
        std::uint32_t const nibble = selector >> (4 * i) & 15;
        std::uint32_t byte = static_cast<std::uint32_t>(bytes >> (8 * (nibble & 7))) & 255;
        if ((nibble & 8) != 0)
        {
            byte = (byte & 128) != 0 ? 255 : 0;
        }
        result |= byte << (8 * i);
    }
    return result;
}

//! lop3: bit i of \p table is the result where a, b, c have the bits of i (a the highest).
inline std::uint32_t logic3(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t table)
{
    std::uint32_t result = 0;
    for (std::uint32_t i = 0; i < 8; ++i)
    {
        if ((table >> i & 1) != 0)
        {
            result |= ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
        }
    }
    return result;
}

inline std::uint32_t reverseBits(std::uint32_t value)
{
    std::uint32_t result = 0;
    for (int i = 0; i < 32; ++i)
    {
        result |= (value >> i & 1) << (31 - i);
    }
    return result;
}

inline std::uint32_t leadingZeros(std::uint32_t value)
{
    return value == 0 ? 32 : static_cast<std::uint32_t>(__builtin_clz(value));
}

// ---- Floats -------------------------------------------------------------------------------------------------------

template <typename T>
inline bool unordered(T a, T b)
{
    if constexpr (std::is_floating_point_v<T>)
    {
        return std::isnan(a) || std::isnan(b);
    }
    else
    {
        return false;
    }
}

template <typename T>
inline T fma(T a, T b, T c)
{
    return std::fma(a, b, c);
}

template <typename T>
inline T reciprocal(T a)
{
    return T { 1 } / a;
}

template <typename T>
inline T squareRoot(T a)
{
    return std::sqrt(a);
}

// NVIDIA's own conversions, in host mode.
inline float floatOfBf16(std::uint16_t bits)
{
    return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw { bits }));
}

inline std::uint16_t bf16OfFloat(float value)
{
    return __nv_bfloat16_raw(__float2bfloat16_rn(value)).x;
}

inline float floatOfFp16(std::uint16_t bits)
{
    return __half2float(__half(__half_raw { bits }));
}

inline std::uint16_t fp16OfFloat(float value)
{
    return __half_raw(__float2half_rn(value)).x;
}

//! Packed conversions: the first operand goes to the upper half.
inline std::uint32_t bf16PairOfFloats(float high, float low)
{
    return static_cast<std::uint32_t>(bf16OfFloat(high)) << 16 | bf16OfFloat(low);
}

inline std::uint32_t fp16PairOfFloats(float high, float low)
{
    return static_cast<std::uint32_t>(fp16OfFloat(high)) << 16 | fp16OfFloat(low);
}

inline std::uint16_t e4m3PairOfFloats(float high, float low)
{
    auto const byte = [](float value) { return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3); };
    return static_cast<std::uint16_t>(byte(high) << 8 | byte(low));
}

inline std::uint32_t fp16PairOfE4m3Pair(std::uint16_t pair)
{
    auto const half
        = [](unsigned byte) { return __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(byte), __NV_E4M3).x; };
    return static_cast<std::uint32_t>(half(pair >> 8)) << 16 | half(pair & 255);
}

//! fma.rn.bf16x2 as sm_80 multiplies by it: the sum with anything but -0 is not modelled.
inline std::uint32_t multiplyBf16Pair(std::uint32_t a, std::uint32_t b, std::uint32_t c)
{
    if (c != 0x80008000u)
    {
        emulator::fail("fma.rn.bf16x2: an addend of %08x; only the product, plus -0 in both halves, is modelled", c);
    }
    return multiplyPair(MmaType::kBF16, a, b);
}

inline std::uint32_t multiplyFp16Pair(std::uint32_t a, std::uint32_t b)
{
    return multiplyPair(MmaType::kFP16, a, b);
}

//! Float to integer as cvt does it: NaN becomes 0, what is out of range the nearest bound. \p value is whole already.
template <typename T, typename F>
inline T saturate(F value)
{
    using Limits = std::numeric_limits<T>;
    if (std::isnan(value))
    {
        return 0;
    }
    F const past = std::ldexp(static_cast<F>(1), Limits::digits); // the largest T is one less
    if (value >= past)
    {
        return Limits::max();
    }
    return value < static_cast<F>(Limits::min()) ? Limits::min() : static_cast<T>(value);
}

// ---- Warps --------------------------------------------------------------------------------------------------------

inline std::uint32_t laneId()
{
    ThreadContext const& thread = *tThread;
    uint3 const index = thread.threadIndex;
    dim3 const shape = thread.blockShape;
    return ((index.z * shape.y + index.y) * shape.x + index.x) % 32;
}

//! shfl.sync: \p clamp packs the segment mask (bits 8-12) and the clamp as PTX does; \p valid says whether the source
//! lay inside.
inline std::uint32_t shuffle(
    Shuffle kind, std::uint32_t value, std::uint32_t operand, std::uint32_t clamp, std::uint32_t mask, bool& valid)
{
    std::uint32_t const width = 32 - (clamp >> 8 & 31);
    std::uint32_t const lane = laneId();
    std::uint32_t const first = lane / width * width;
    std::uint32_t const steps = operand & 31;
    switch (kind)
    {
    case Shuffle::kINDEX:
        valid = true;
        break;
    case Shuffle::kUP:
        valid = lane - first >= steps;
        break;
    case Shuffle::kDOWN:
        valid = lane + steps < first + width;
        break;
    case Shuffle::kXOR:
        valid = (lane ^ steps) < first + width;
        break;
    }
    return emulator::shuffleWord(mask, value, kind, static_cast<int>(steps), static_cast<int>(width));
}

} // namespace trtllm_kvmap::emulator::ptx
