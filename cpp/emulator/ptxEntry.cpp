#include "emulator/ptxEntry.h"

#include "emulator/launch.h"

#include <dlfcn.h>

#include <map>

namespace trtllm_kvmap::emulator
{

namespace
{

std::map<std::string, PtxEntry>& entries()
{
    static std::map<std::string, PtxEntry> sEntries;
    return sEntries;
}

} // namespace

bool registerPtxEntry(PtxEntry const& entry)
{
    entries()[entry.name] = entry;
    return true;
}

PtxEntry const* findPtxEntry(void const* kernel, std::string& error)
{
    Dl_info symbol {};
    if (dladdr(kernel, &symbol) == 0 || symbol.dli_sname == nullptr || symbol.dli_saddr != kernel)
    {
        error = "The kernel's function has no symbol the dynamic linker sees: link a shared object, or with -rdynamic, "
                "and do not make kernels static.";
        return nullptr;
    }
    auto const found = entries().find(symbol.dli_sname);
    if (found == entries().end())
    {
        error = std::string("No translated PTX is linked for the kernel ") + symbol.dli_sname + ".";
        return nullptr;
    }
    return &found->second;
}

} // namespace trtllm_kvmap::emulator

//! Run a translated entry by its name, with parameters packed as CUDA lays them out: for tests of single instructions.
//! Returns nullptr, or a sentence that stays valid until this host thread calls again.
extern "C" char const* trtllmKvMapEmulatorRunPtx(
    char const* name, int blocks, int threads, int sharedBytes, void const* parameters, int parameterBytes)
{
    using namespace trtllm_kvmap::emulator;
    static thread_local std::string tError;
    auto const found = entries().find(name);
    if (found == entries().end() || found->second.parameterBytes > static_cast<std::size_t>(parameterBytes))
    {
        tError = std::string("There is no entry ") + name + " that takes " + std::to_string(parameterBytes) + " bytes.";
        return tError.c_str();
    }
    alignas(128) unsigned char aligned[PackedParameters::kCAPACITY] {};
    std::memcpy(aligned, parameters, static_cast<std::size_t>(parameterBytes));
    tError = launchGrid(currentOptions(), dim3(static_cast<unsigned>(blocks)), 1, dim3(static_cast<unsigned>(threads)),
        static_cast<std::size_t>(sharedBytes), found->second.run, aligned)
                 .error;
    return tError.empty() ? nullptr : tError.c_str();
}
