#include "emulator/ptxEntry.h"

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
    Dl_info symbol{};
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
