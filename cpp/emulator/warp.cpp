#include "emulator/warp.h"

#include "emulator/block.h"

namespace trtllm_kvmap::emulator
{

namespace
{

void requireWholeWarp(unsigned mask, char const* instruction)
{
    if (mask != 0xffffffffu)
    {
        fail("%s: mask 0x%08x leaves lanes out; only whole warps are modelled", instruction, mask);
    }
}

struct ShuffleOperands
{
    std::uint32_t value;
    std::uint32_t result;
    Shuffle kind;
    int operand;
    int width;
};

//! The lane that lane \p lane reads from; its own where the source lies outside its segment.
int sourceLane(ShuffleOperands const& operands, int lane)
{
    int const first = lane / operands.width * operands.width;
    int source = lane;
    switch (operands.kind)
    {
    case Shuffle::kINDEX:
        return first + (operands.operand & (operands.width - 1));
    case Shuffle::kUP:
        source = lane - operands.operand;
        break;
    case Shuffle::kDOWN:
        source = lane + operands.operand;
        break;
    case Shuffle::kXOR:
        source = lane ^ operands.operand;
        break;
    }
    // An xor may reach into an earlier segment, but not into a later one.
    bool const inside = source >= (operands.kind == Shuffle::kXOR ? 0 : first) && source < first + operands.width;
    return inside ? source : lane;
}

void executeShuffle(Block& /*block*/, Thread* lanes)
{
    for (int lane = 0; lane < kWARP; ++lane)
    {
        auto& own = *static_cast<ShuffleOperands*>(lanes[lane].operands);
        own.result = static_cast<ShuffleOperands*>(lanes[sourceLane(own, lane)].operands)->value;
    }
}

struct BallotOperands
{
    bool predicate;
    unsigned result;
};

void executeBallot(Block& /*block*/, Thread* lanes)
{
    unsigned bits = 0;
    for (int lane = 0; lane < kWARP; ++lane)
    {
        bits |= static_cast<unsigned>(static_cast<BallotOperands*>(lanes[lane].operands)->predicate) << lane;
    }
    for (int lane = 0; lane < kWARP; ++lane)
    {
        static_cast<BallotOperands*>(lanes[lane].operands)->result = bits;
    }
}

} // namespace

void syncWarp(unsigned mask)
{
    requireWholeWarp(mask, "__syncwarp");
    Block::current()->gather(Collective::kSYNC_WARP, kWARP, nullptr, nullptr);
}

std::uint32_t shuffleWord(unsigned mask, std::uint32_t value, Shuffle kind, int operand, int width)
{
    requireWholeWarp(mask, "shfl.sync");
    if (width < 1 || width > kWARP || (width & (width - 1)) != 0)
    {
        fail("shfl.sync: width %d is not a power of two up to 32", width);
    }
    ShuffleOperands operands { value, 0, kind, operand, width };
    Block::current()->gather(Collective::kSHUFFLE, kWARP, &operands, executeShuffle);
    return operands.result;
}

unsigned ballot(unsigned mask, bool predicate)
{
    requireWholeWarp(mask, "vote.sync");
    BallotOperands operands { predicate, 0 };
    Block::current()->gather(Collective::kBALLOT, kWARP, &operands, executeBallot);
    return operands.result;
}

} // namespace trtllm_kvmap::emulator
