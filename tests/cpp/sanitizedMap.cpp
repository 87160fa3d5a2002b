// One map through the kernels, as a program of its own for the sanitizers: sanitizedMap <seed> <kernel>... Every buffer
// has just the size it needs, so that AddressSanitizer sees a step beyond it; each result is compared with the scalar
// version's, the whole memory, because a kernel that does nothing is quiet too. Ends with 1 and a sentence when something
// is off.
#include "trtllm_kvmap/mapKvCache.h"

#include "emulator/launch.h"
#include "kernels/numberFormats.h"
#include "kernels/status.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

using namespace trtllm_kvmap;

namespace
{

constexpr ModelShape kSource{1, 2, 64, 64, 0};
constexpr ModelShape kTarget{2, 3, 64, 32, 0};
constexpr int32_t kTokens = 16; // few: a sanitizer's price is by thread
constexpr int32_t kFirstPosition = 11;
constexpr int32_t kVocabulary = 9;

float nextNumber()
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
}

std::vector<float> numbers(size_t count, float size)
{
    std::vector<float> all(count);
    for (float& one : all)
    {
        one = size * nextNumber();
    }
    return all;
}

// bf16 blocks [numBlocks][layers][2][heads][tokensPerBlock][headDim + padding]; padding forbids 16-byte accesses.
struct Pool
{
    std::vector<uint16_t> memory;
    PoolView view{};

    Pool(ModelShape const& shape, int32_t tokensPerBlock, int32_t padding)
    {
        int64_t const row = shape.headDim + padding;
        int64_t const field = shape.numKvHeads * tokensPerBlock * row;
        view.numBlocks = kTokens / tokensPerBlock + 2;
        view.numLayers = shape.numLayers;
        view.numKvHeads = shape.numKvHeads;
        view.tokensPerBlock = tokensPerBlock;
        view.headDim = shape.headDim;
        view.dtype = DType::kBFLOAT16;
        view.scale[0] = view.scale[1] = 1.0f;
        view.blockStride = shape.numLayers * 2 * field;
        view.headStride = tokensPerBlock * row;
        view.tokenStride = row;
        view.channelStride = 1;
        memory.assign(view.numBlocks * view.blockStride, 0x7fff);
        for (int32_t layer = 0; layer < shape.numLayers; ++layer)
        {
            view.layers[0][layer] = memory.data() + 2 * layer * field;
            view.layers[1][layer] = memory.data() + (2 * layer + 1) * field;
        }
    }
};

// Slots of a shuffled span, no two alike; token 5 is skipped.
std::vector<int64_t> slots(PoolView const& pool, int32_t step)
{
    std::vector<int64_t> all(kTokens);
    for (int32_t i = 0; i < kTokens; ++i)
    {
        all[i] = (3 + static_cast<int64_t>(i) * step) % (pool.numBlocks * pool.tokensPerBlock - 1); // an odd number
    }
    all[5] = -1;
    return all;
}

struct Rope
{
    std::vector<float> cos;
    std::vector<float> sin;
    RopeTable table;

    explicit Rope(ModelShape const& shape)
    {
        int32_t const numPositions = kFirstPosition + kTokens;
        int32_t const half = shape.rotaryDim / 2;
        for (int32_t i = 0; i < numPositions * half; ++i)
        {
            double const angle = i / half * std::pow(10000.0, -static_cast<double>(i % half) / half);
            cos.push_back(static_cast<float>(std::cos(angle)));
            sin.push_back(static_cast<float>(std::sin(angle)));
        }
        table = RopeTable{cos.data(), sin.data(), numPositions, 1.0f};
    }
};

// Pooled groups, heads and slices in no order, own slices, one head of its own, copies: more tiles than the emulator has
// multiprocessors, more K-blocks than a ring has stages.
struct Groups
{
    Slice const pooled[5] = {{Origin::kSOURCE, Field::kKEY, 0, 1}, {Origin::kTARGET, Field::kKEY, 0, 1},
        {Origin::kSOURCE, Field::kKEY, 0, 0}, {Origin::kSOURCE, Field::kKEY, 0, 1}, {Origin::kSOURCE, Field::kKEY, 0, 0}};
    Slice const one[1] = {{Origin::kSOURCE, Field::kVALUE, 0, 0}};
    Slice const copied[3] = {{Origin::kSOURCE, Field::kKEY, 0, 0}, {Origin::kSOURCE, Field::kKEY, 0, 1},
        {Origin::kSOURCE, Field::kKEY, 0, 1}};
    int32_t const heads[3] = {2, 0, 1};
    std::vector<float> const weights = numbers(5 * 64 * 3 * 64, 0.1f);
    std::vector<float> const bias = numbers(3 * 64, 1.0f);
    std::vector<float> const scale = numbers(3 * 64, 1.0f);
    MapGroupSpec const specs[4] = {{Field::kKEY, 0, 3, 5, heads, pooled, weights.data(), bias.data(), scale.data()},
        {Field::kVALUE, 0, 1, 1, heads, one, weights.data(), bias.data(), scale.data()},
        {Field::kKEY, 1, 3, 3, heads, copied, nullptr, nullptr, nullptr},
        {Field::kVALUE, 1, 3, 5, heads, pooled, weights.data(), bias.data(), nullptr}};
};

void require(Status const& status)
{
    if (!isOk(status))
    {
        std::printf("%s\n", status.sentence);
        std::exit(1);
    }
}

using Buffer = std::unique_ptr<void, decltype(&std::free)>;

Buffer allocate(size_t bytes)
{
    return Buffer(std::aligned_alloc(256, (bytes + 255) / 256 * 256), &std::free);
}

// Map with one kernel and with the scalar version; false when they differ by more than half precision explains.
bool agrees(DType computeType, DType weightType, Variant variant, int32_t padding)
{
    Groups const groups;
    MapSpec const spec{kSource, kTarget, computeType, weightType, 4, groups.specs};
    MapParams params{};
    size_t bytes = 0;
    require(packedMapSize(spec, &bytes));
    Buffer const blob = allocate(bytes);
    require(packMap(spec, blob.get(), bytes, &params.map));

    Pool source(kSource, 8, padding);
    Pool targets[2] = {Pool(kTarget, 4, padding), Pool(kTarget, 4, padding)};
    for (uint16_t& element : source.memory)
    {
        storeNumber(&element, 0, DType::kBFLOAT16, nextNumber());
    }
    std::vector<float> const tokens = numbers(kVocabulary * kTarget.numKvHeads * kTarget.headDim, 1.0f);
    std::vector<int64_t> const sourceSlots = slots(source.view, 7);
    std::vector<int64_t> const targetSlots = slots(targets[0].view, 5);
    std::vector<int64_t> positions;
    std::vector<int64_t> ids;
    for (int32_t i = 0; i < kTokens; ++i)
    {
        positions.push_back(kFirstPosition + i);
        ids.push_back(i % kVocabulary);
    }
    Rope const sourceRope(kSource);
    Rope const targetRope(kTarget);
    params.source = source.view;
    params.span
        = Span{sourceSlots.data(), targetSlots.data(), positions.data(), ids.data(), kTokens, IndexType::kINT64};
    params.sourceRope = sourceRope.table;
    params.targetRope = targetRope.table;
    params.tokenTable = TokenTable{{tokens.data(), tokens.data()}, kVocabulary, DType::kFLOAT32};
    params.variant = variant;
    params.workspaceBytes = workspaceSize(params.map, kTokens, 0, variant);
    Buffer const workspace = allocate(params.workspaceBytes);
    params.workspace = workspace.get();

    params.target = targets[0].view;
    require(mapKvCache(params, nullptr));
    params.target = targets[1].view;
    require(mapKvCacheCpu(params));
    for (size_t i = 0; i < targets[0].memory.size(); ++i)
    {
        float const found = loadNumber(targets[0].memory.data(), i, DType::kBFLOAT16);
        float const wanted = loadNumber(targets[1].memory.data(), i, DType::kBFLOAT16);
        bool const same = targets[0].memory[i] == targets[1].memory[i];
        if (!same && !(std::fabs(found - wanted) < 0.03f * (1.0f + std::fabs(wanted))))
        {
            std::printf("element %zu is %g, not %g\n", i, found, wanted);
            return false;
        }
    }
    return true;
}

} // namespace

int main(int count, char** arguments)
{
    struct Kernel
    {
        char const* name;
        DType computeType;
        Variant variant;
        int32_t padding;
        bool float8Weights;
    };
    Kernel const kernels[] = {{"wide", DType::kBFLOAT16, Variant::kWIDE, 0},
        {"narrow", DType::kBFLOAT16, Variant::kNARROW, 0}, {"small-t", DType::kBFLOAT16, Variant::kSMALL_T, 0},
        {"hopper", DType::kBFLOAT16, Variant::kHOPPER, 0}, {"odd-strides", DType::kFLOAT16, Variant::kNARROW, 1},
        {"plain", DType::kFLOAT32, Variant::kAUTO, 0},
        {"float8-weights", DType::kBFLOAT16, Variant::kSMALL_T, 0, true}};
    emulator::currentOptions().seed = std::strtoull(arguments[1], nullptr, 10);
    for (int i = 2; i < count; ++i)
    {
        for (Kernel const& kernel : kernels)
        {
            if (std::strcmp(kernel.name, arguments[i]) == 0)
            {
                DType const weightType = kernel.float8Weights ? DType::kFP8_E4M3 : kernel.computeType;
                if (!agrees(kernel.computeType, weightType, kernel.variant, kernel.padding))
                {
                    return 1;
                }
                std::printf("%s ran\n", kernel.name);
            }
        }
    }
    return 0;
}
