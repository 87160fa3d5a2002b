#pragma once

// Kernels that ptxToCpp.py translated from PTX. The translation registers each entry under its mangled name, which
// nvcc and g++ agree on, so that a launch of the C++ function finds the PTX of that very kernel.

#include <cstddef>
#include <cstring>
#include <string>

namespace trtllm_kvmap::emulator
{

struct PtxEntry
{
    char const* name; //!< mangled
    void (*run)(void const* parameters); //!< one thread
    std::size_t parameterBytes;
};

//! Called by the translation's static initialisers. Returns true.
bool registerPtxEntry(PtxEntry const& entry);

//! The entry of a kernel by the address of its C++ function, or nullptr and a sentence in \p error. The function must
//! be visible to the dynamic linker: in a shared object, or in a program linked with -rdynamic.
PtxEntry const* findPtxEntry(void const* kernel, std::string& error);

//! Kernel parameters as CUDA lays them out: in order, each at its own alignment.
struct PackedParameters
{
    static constexpr std::size_t kCAPACITY = 32764; //!< CUDA's limit from sm_70 on
    alignas(128) unsigned char bytes[kCAPACITY];
    std::size_t size;
};

template <typename... Params, typename... Arguments>
PackedParameters packParameters(Arguments&&... arguments)
{
    PackedParameters packed {};
    auto const append = [&packed](auto const& value)
    {
        packed.size
            = (packed.size + alignof(decltype(value)) - 1) / alignof(decltype(value)) * alignof(decltype(value));
        std::memcpy(packed.bytes + packed.size, &value, sizeof(value));
        packed.size += sizeof(value);
    };
    (append(static_cast<Params>(arguments)), ...);
    return packed;
}

} // namespace trtllm_kvmap::emulator
