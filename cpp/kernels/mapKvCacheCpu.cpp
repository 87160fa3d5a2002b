// map_kv written out, one number at a time, in float64:
//
//     y = R_target( s sum_i R_source^-1(x_i) W_i + b )
//
// s, a factor for each column, is 1 unless weights are kept in fp8-e4m3.
// R turns the channel pairs of a key by its position; values do not turn. This file is here to be read and to be
// compared with; the kernels compute the same.

#include "kernels/checkCall.h"
#include "kernels/numberFormats.h"
#include "kernels/packedMap.h"
#include "kernels/status.h"

namespace trtllm_kvmap
{
namespace
{

struct Token
{
    int64_t sourceSlot;
    int64_t targetSlot;
    int64_t position;
    int64_t id;
};

int64_t loadIndex(void const* array, int64_t i, IndexType type)
{
    return type == IndexType::kINT32 ? static_cast<int32_t const*>(array)[i] : static_cast<int64_t const*>(array)[i];
}

int64_t numSlots(PoolView const& pool)
{
    return int64_t{pool.numBlocks} * pool.tokensPerBlock;
}

bool covers(RopeTable const& rope, ModelShape const& shape, int64_t position)
{
    return shape.rotaryDim == 0 || position < rope.numPositions;
}

// False for a token that is skipped.
bool loadToken(MapParams const& p, int64_t i, Token* token)
{
    IndexType const type = p.span.indexType;
    token->sourceSlot = loadIndex(p.span.sourceSlots, i, type);
    token->targetSlot = loadIndex(p.span.targetSlots, i, type);
    token->position = loadIndex(p.span.positions, i, type);
    token->id = p.map.readsTokenIds ? loadIndex(p.span.tokenIds, i, type) : 0;
    return token->sourceSlot >= 0 && token->sourceSlot < numSlots(p.source) && token->targetSlot >= 0
        && token->targetSlot < numSlots(p.target) && token->position >= 0
        && covers(p.sourceRope, p.map.source, token->position) && covers(p.targetRope, p.map.target, token->position)
        && token->id >= 0 && (!p.map.readsTokenIds || token->id < p.tokenTable.vocabSize);
}

int64_t elementOffset(PoolView const& pool, int64_t slot, int32_t head, int32_t channel)
{
    return slot / pool.tokensPerBlock * pool.blockStride + head * pool.headStride
        + slot % pool.tokensPerBlock * pool.tokenStride + channel * pool.channelStride;
}

// Turn the pairs of x: `forwards` puts RoPE on, else it is taken off again.
void turn(double* x, RopeTable const& rope, ModelShape const& shape, int64_t position, bool forwards)
{
    int32_t const half = shape.rotaryDim / 2;
    for (int32_t i = 0; i < half; ++i)
    {
        double& a = x[shape.interleaved ? 2 * i : i];
        double& b = x[shape.interleaved ? 2 * i + 1 : i + half];
        double const cos = rope.cos[position * half + i];
        double const sin = forwards ? rope.sin[position * half + i] : -rope.sin[position * half + i];
        double const scale = forwards ? rope.scale : 1.0 / rope.scale;
        double const turned = scale * (a * cos - b * sin);
        b = scale * (b * cos + a * sin);
        a = turned;
    }
}

// One slice of one token in real numbers; `asStored` leaves the rotation of a key.
void readSlice(MapParams const& p, Slice const& s, Token const& token, bool asStored, double* x)
{
    int32_t const field = static_cast<int32_t>(s.field);
    if (s.origin == Origin::kTARGET)
    {
        int32_t const dim = p.map.target.headDim;
        int64_t const first = (token.id * p.map.target.numKvHeads + s.head) * dim;
        for (int32_t c = 0; c < dim; ++c)
        {
            x[c] = loadNumber(p.tokenTable.fields[field], first + c, p.tokenTable.dtype);
        }
        return;
    }
    for (int32_t c = 0; c < p.source.headDim; ++c)
    {
        x[c] = static_cast<double>(p.source.scale[field])
            * loadNumber(p.source.layers[field][s.layer], elementOffset(p.source, token.sourceSlot, s.head, c),
                p.source.dtype);
    }
    if (s.field == Field::kKEY && !asStored)
    {
        turn(x, p.sourceRope, p.map.source, token.position, false);
    }
}

// Round once and write one head of one token; `asStored` leaves a key's rotation as it is.
void writeHead(MapParams const& p, Field field, int32_t layer, int32_t head, Token const& token, bool asStored,
    double* y)
{
    if (field == Field::kKEY && !asStored)
    {
        turn(y, p.targetRope, p.map.target, token.position, true);
    }
    int32_t const f = static_cast<int32_t>(field);
    for (int32_t c = 0; c < p.target.headDim; ++c)
    {
        storeNumber(p.target.layers[f][layer], elementOffset(p.target, token.targetSlot, head, c), p.target.dtype,
            static_cast<float>(y[c] / p.target.scale[f]));
    }
}

void mapHead(MapParams const& p, MapGroup const& group, int32_t index, Token const& token)
{
    PackedMap const& map = p.map;
    int32_t const dim = map.target.headDim;
    int32_t const turning = turningChannels(map.target, group.field);
    int32_t const elementBytes = sizeOf(map.weightType);
    bool const scaled = map.weightType == DType::kFP8_E4M3;
    float const* bias = table<float>(map, map.bias) + group.bias;
    double y[kMaxHeadDim];
    for (int32_t column = 0; column < dim; ++column)
    {
        y[channelOfColumn(column, turning, map.target.interleaved)] = bias[index * dim + column];
    }
    int32_t k = 0;
    for (int32_t i = 0; i < group.numSourceSlices + group.numOwnSlices; ++i)
    {
        Slice const& s = table<Slice>(map, map.slices)[table<int32_t>(map, map.sliceLists)[group.sliceList + i]];
        ModelShape const& shape = s.origin == Origin::kSOURCE ? map.source : map.target;
        double x[kMaxHeadDim];
        readSlice(p, s, token, false, x);
        for (int32_t column = 0; column < dim; ++column)
        {
            double sum = 0.0;
            for (int32_t c = 0; c < shape.headDim; ++c)
            {
                sum += x[c]
                    * loadNumber(table<char>(map, map.weights),
                        group.weight + weightIndex(index * dim + column, k + c, group.kBlocks, elementBytes),
                        map.weightType);
            }
            double const scale = scaled ? table<float>(map, map.scales)[group.bias + index * dim + column] : 1.0;
            y[channelOfColumn(column, turning, map.target.interleaved)] += scale * sum;
        }
        k += sliceWidth(shape);
    }
    writeHead(p, group.field, group.layer, table<int32_t>(map, map.headLists)[group.headList + index], token, false, y);
}

void copyHead(MapParams const& p, CopyHead const& copy, Token const& token)
{
    int32_t const field = static_cast<int32_t>(copy.field);
    bool const keyStays = copy.plain && p.sameRotation;
    bool const asStored = copy.plain && (copy.field == Field::kVALUE || p.sameRotation);
    if (asStored && p.source.dtype == p.target.dtype && p.source.scale[field] == p.target.scale[field])
    {
        // Nothing changes: move the bits, whatever they mean.
        int32_t const bytes = sizeOf(p.source.dtype);
        for (int32_t c = 0; c < p.target.headDim; ++c)
        {
            std::memcpy(static_cast<char*>(p.target.layers[field][copy.layer])
                    + elementOffset(p.target, token.targetSlot, copy.head, c) * bytes,
                static_cast<char const*>(p.source.layers[field][copy.slice.layer])
                    + elementOffset(p.source, token.sourceSlot, copy.slice.head, c) * bytes,
                bytes);
        }
        return;
    }
    double x[kMaxHeadDim];
    readSlice(p, copy.slice, token, keyStays, x);
    writeHead(p, copy.field, copy.layer, copy.head, token, keyStays, x);
}

} // namespace

Status mapKvCacheCpu(MapParams const& params)
{
    Status const status = checkCall(params);
    if (!isOk(status))
    {
        return status;
    }
    PackedMap const& map = params.map;
    for (int64_t i = 0; i < params.span.numTokens; ++i)
    {
        Token token;
        if (!loadToken(params, i, &token))
        {
            continue;
        }
        for (int32_t c = 0; c < map.numCopies; ++c)
        {
            copyHead(params, table<CopyHead>(map, map.copies)[c], token);
        }
        for (int32_t g = 0; g < map.numGroups; ++g)
        {
            MapGroup const& group = table<MapGroup>(map, map.groups)[g];
            for (int32_t index = 0; index < group.numHeads; ++index)
            {
                mapHead(params, group, index, token);
            }
        }
    }
    return okStatus();
}

} // namespace trtllm_kvmap
