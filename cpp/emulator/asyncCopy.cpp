// cp.async: per-thread queues of copies, in groups.

#include "emulator/cluster.h"
#include "emulator/sanitizer.h"
#include "emulator/warp.h"

#include <cstring>

namespace trtllm_kvmap::emulator
{

namespace
{

constexpr std::size_t kBYTES = 16;

void perform(AsyncCopy const& copy)
{
    noteWrite(copy.destination, kBYTES);
    if (!copy.valid)
    {
        std::memset(copy.destination, 0, kBYTES);
        return;
    }
    noteRead(copy.source, kBYTES);
    std::memcpy(copy.destination, copy.source, kBYTES);
}

} // namespace

void asyncCopy16(std::uint32_t destination, void const* source, bool valid)
{
    Block& block = *Block::current();
    Thread& thread = block.cluster().running();
    unsigned char* const bytes = sharedBytes(destination, kBYTES, kBYTES, "cp.async");
    if (valid)
    {
        checkGlobal(source, kBYTES, "cp.async");
    }
    ++block.statistics().asyncCopies;
    AsyncCopy const copy { bytes, source, valid, thread.openGroup };
    switch (block.options().asyncCopies)
    {
    case AsyncCopies::kAT_ISSUE:
        perform(copy);
        break;
    case AsyncCopies::kPOISONED:
        noteWrite(bytes, kBYTES);
        std::memset(bytes, 0xff, kBYTES);
        break;
    case AsyncCopies::kAT_WAIT:
        break;
    }
    if (thread.copies.size() == thread.copies.capacity())
    {
        fail("cp.async: more than %zu copies of one thread in flight", thread.copies.size());
    }
    thread.copies.push_back(copy);
}

bool wholeOrNothing(std::uint32_t sourceBytes)
{
    if (sourceBytes != 0 && sourceBytes != kBYTES)
    {
        fail("cp.async: a source of %u bytes; only 16 (copy) and 0 (fill with zeros) are modelled", sourceBytes);
    }
    return sourceBytes != 0;
}

void asyncCommit()
{
    ++Block::current()->cluster().running().openGroup;
}

void asyncWait(int pendingGroups)
{
    Block& block = *Block::current();
    Thread& thread = block.cluster().running();
    bool const performed = block.options().asyncCopies == AsyncCopies::kAT_ISSUE;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < thread.copies.size(); ++i)
    {
        AsyncCopy const copy = thread.copies[i];
        // Groups openGroup - pendingGroups .. openGroup - 1 may stay, and so may what is not committed yet.
        if (static_cast<std::int64_t>(copy.group) >= static_cast<std::int64_t>(thread.openGroup) - pendingGroups)
        {
            thread.copies[kept++] = copy;
        }
        else if (!performed)
        {
            perform(copy);
        }
    }
    thread.copies.resize(kept);
}

} // namespace trtllm_kvmap::emulator
