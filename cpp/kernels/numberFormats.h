// The number formats of KV caches as bits, from their definition, so that host code needs no CUDA header.
#pragma once

#include "kernels/dtype.h"

#include <cmath>
#include <cstring>

namespace trtllm_kvmap
{

// A binary format narrower than float32. Without infinities (fp8-e4m3) only the topmost code is a NaN, and too large a
// number becomes the largest.
struct NarrowFormat
{
    int32_t exponentBits;
    int32_t mantissaBits;
    bool hasInfinity;

    constexpr int32_t bias() const
    {
        return (1 << (exponentBits - 1)) - 1;
    }

    constexpr uint32_t infinity() const
    {
        return ((1u << exponentBits) - 1) << mantissaBits;
    }

    constexpr uint32_t nan() const
    {
        return (1u << (exponentBits + mantissaBits)) - 1;
    }
};

constexpr NarrowFormat narrowFormat(DType dtype)
{
    return dtype == DType::kFLOAT16 ? NarrowFormat{5, 10, true}
        : dtype == DType::kBFLOAT16 ? NarrowFormat{8, 7, true}
                                    : NarrowFormat{4, 3, false};
}

inline float decodeNarrow(uint32_t bits, NarrowFormat format)
{
    uint32_t const magnitude = bits & format.nan();
    int32_t const exponent = static_cast<int32_t>(magnitude >> format.mantissaBits);
    int32_t const mantissa = static_cast<int32_t>(magnitude & ((1u << format.mantissaBits) - 1));
    float value;
    if (format.hasInfinity ? magnitude > format.infinity() : magnitude == format.nan())
    {
        value = NAN;
    }
    else if (format.hasInfinity && magnitude == format.infinity())
    {
        value = INFINITY;
    }
    else
    {
        int32_t const implicitOne = exponent ? 1 << format.mantissaBits : 0;
        value = std::ldexp(static_cast<float>(mantissa + implicitOne),
            (exponent ? exponent : 1) - format.bias() - format.mantissaBits);
    }
    return bits > format.nan() ? -value : value;
}

// Round half to even.
inline uint32_t encodeNarrow(float value, NarrowFormat format)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t const sign = bits >> 31 << (format.exponentBits + format.mantissaBits);
    uint32_t const magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
    {
        return sign | format.nan();
    }
    int32_t const rebias = 127 - format.bias();
    uint32_t code;
    if (static_cast<int32_t>(magnitude >> 23) <= rebias)
    {
        // Subnormal: whole steps of 2^(1 - bias - mantissaBits); one step too many is the smallest normal number.
        double const steps = std::ldexp(std::fabs(static_cast<double>(value)), format.bias() - 1 + format.mantissaBits);
        code = static_cast<uint32_t>(std::nearbyint(steps));
    }
    else
    {
        // Normal: drop the low bits; a carry walks into the exponent, where it belongs.
        int32_t const dropped = 23 - format.mantissaBits;
        uint32_t const half = (1u << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1);
        code = ((magnitude + half) >> dropped) - (static_cast<uint32_t>(rebias) << format.mantissaBits);
    }
    uint32_t const largest = format.hasInfinity ? format.infinity() : format.nan() - 1;
    return sign | (code < largest ? code : largest);
}

// Element `index` of an array of `dtype`.
inline float loadNumber(void const* array, int64_t index, DType dtype)
{
    if (dtype == DType::kFLOAT32)
    {
        return static_cast<float const*>(array)[index];
    }
    uint32_t const bits = dtype == DType::kFP8_E4M3 ? uint32_t{static_cast<uint8_t const*>(array)[index]}
                                                    : uint32_t{static_cast<uint16_t const*>(array)[index]};
    return decodeNarrow(bits, narrowFormat(dtype));
}

inline void storeNumber(void* array, int64_t index, DType dtype, float value)
{
    if (dtype == DType::kFLOAT32)
    {
        static_cast<float*>(array)[index] = value;
        return;
    }
    uint32_t const bits = encodeNarrow(value, narrowFormat(dtype));
    if (dtype == DType::kFP8_E4M3)
    {
        static_cast<uint8_t*>(array)[index] = static_cast<uint8_t>(bits);
    }
    else
    {
        static_cast<uint16_t*>(array)[index] = static_cast<uint16_t>(bits);
    }
}

} // namespace trtllm_kvmap
