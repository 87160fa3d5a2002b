#include "mapCall.h"

#include "cacheDtype.h"
#include "callWorkspace.h"
#include "clearMemory.h"
#include "denseCache.h"
#include "pagedCache.h"
#include "resolveSlots.h"
#include "sentence.h"
#include "sequenceSpans.h"

#include <algorithm>

namespace trtllm_kvmap::plugin
{

namespace
{

bool isOk(Status const& status)
{
    return status.code == StatusCode::kOK;
}

Status cudaFailed(char const* sentence)
{
    Status status = refuse("CUDA: %s.", sentence);
    status.code = StatusCode::kCUDA_ERROR;
    return status;
}

class MapCall
{
public:
    MapCall(KvMapConfig const& config, PackedMap const& map, Ports const& ports, Tensors const& tensors)
        : mConfig(config)
        , mPorts(ports)
        , mTensors(tensors)
        , mSpans{tensors.data<int32_t>(kHOST_SPANS), static_cast<int32_t>(tensors.dim(kHOST_SPANS, 0))}
    {
        mParams.map = map;
    }

    // In this order; each needs those before it.
    Status prepare()
    {
        Status status = checkAddresses();
        status = isOk(status) ? countTokens() : status;
        status = isOk(status) ? fillTokens() : status;
        status = isOk(status) ? (isPaged() ? viewPaged() : viewDense()) : status;
        if (isOk(status))
        {
            fillRest();
            status = validate(mParams);
        }
        return status;
    }

    Status launch(Stream stream)
    {
        // What a dense output holds where no token is mapped: zeros, so that it depends on the inputs alone.
        if (!isPaged() && mParams.span.numTokens < maxTokens(mConfig, mTensors.descs[kSOURCE_KV].dims))
        {
            if (char const* const error = clearMemory(mTensors.output, denseCacheBytes(mParams.target), stream))
            {
                return cudaFailed(error);
            }
        }
        int64_t firstToken = 0;
        for (int32_t sequence = 0; sequence < mSpans.numSequences; ++sequence)
        {
            if (char const* const error = resolveSlots(slotsOf(sequence, firstToken), stream))
            {
                return cudaFailed(error);
            }
            firstToken += mSpans.count(sequence);
        }
        return mapKvCache(mParams, stream);
    }

private:
    bool isPaged() const
    {
        return mConfig.mode == static_cast<int32_t>(Mode::kPAGED);
    }

    Status checkAddresses() const
    {
        for (int32_t i = 0; i < mPorts.numInputs(); ++i)
        {
            nvinfer1::Dims const& dims = mTensors.descs[i].dims;
            bool const empty = std::find(dims.d, dims.d + dims.nbDims, 0) != dims.d + dims.nbDims;
            if (mTensors.inputs[i] == nullptr && !empty)
            {
                return refuse("Input %s has no address.", mPorts[i].name);
            }
        }
        if (mTensors.output == nullptr || mTensors.workspace == nullptr)
        {
            return refuse("Output %s or the workspace has no address.", mPorts[mPorts.numInputs()].name);
        }
        return Status{};
    }

    Status countTokens()
    {
        int64_t const numPositions = std::min(mTensors.dim(kSOURCE_ROPE, 1), mTensors.dim(kTARGET_ROPE, 1));
        int64_t const limit = maxTokens(mConfig, mTensors.descs[kSOURCE_KV].dims);
        return checkSpans(mSpans, numPositions, limit, &mParams.span.numTokens);
    }

    Status fillTokens()
    {
        if (!mParams.map.readsTokenIds)
        {
            return Status{};
        }
        int32_t const ids = mPorts.firstTokenInput() + kTOKEN_IDS;
        int32_t const keys = mPorts.firstTokenInput() + kTOKEN_TABLE_KEYS;
        int32_t const values = mPorts.firstTokenInput() + kTOKEN_TABLE_VALUES;
        bool const alike = mTensors.descs[keys].type == mTensors.descs[values].type
            && mTensors.dim(keys, 0) == mTensors.dim(values, 0);
        if (mTensors.dim(ids, 0) != mParams.span.numTokens || !alike)
        {
            return refuse("There are %lld token ids for %lld tokens, and token tables of %lld and %lld rows; an id for "
                          "each token and two tables of one size and type are needed.",
                static_cast<long long>(mTensors.dim(ids, 0)), static_cast<long long>(mParams.span.numTokens),
                static_cast<long long>(mTensors.dim(keys, 0)), static_cast<long long>(mTensors.dim(values, 0)));
        }
        mParams.span.tokenIds = mTensors.inputs[ids];
        mParams.tokenTable = TokenTable{{mTensors.inputs[keys], mTensors.inputs[values]}, mTensors.dim(keys, 0),
            dtypeOf(mTensors.descs[keys].type)};
        return Status{};
    }

    Status viewPaged()
    {
        mSource = cacheOf(kSOURCE_SIDE, mParams.map.source);
        mTarget = cacheOf(kTARGET_SIDE, mParams.map.target);
        Status status = checkTables(kSOURCE_SIDE, mSource);
        status = isOk(status) ? checkTables(kTARGET_SIDE, mTarget) : status;
        status = isOk(status) ? viewPagedCache(mSource, mSpans, false, &mParams.source) : status;
        return isOk(status) ? viewPagedCache(mTarget, mSpans, true, &mParams.target) : status;
    }

    PagedCache cacheOf(Side side, ModelShape const& shape) const
    {
        int32_t const first = kFIRST_SIDE + side * kINPUTS_PER_SIDE;
        PagedCache cache{};
        cache.side = side == kSOURCE_SIDE ? "source" : "target";
        cache.shape = shape;
        cache.dtype = static_cast<DType>(mConfig.cacheDtypes[side]);
        cache.scales = mConfig.cacheScales + 2 * side;
        cache.poolPointers = mTensors.data<int64_t>(first + kHOST_POOL_POINTERS);
        cache.poolMapping = mTensors.data<int32_t>(first + kHOST_POOL_MAPPING);
        cache.blockOffsets = mTensors.data<int32_t>(first + kHOST_BLOCK_OFFSETS);
        cache.numSequences = static_cast<int32_t>(mTensors.dim(first + kHOST_BLOCK_OFFSETS, 1));
        cache.maxBlocks = static_cast<int32_t>(mTensors.dim(first + kHOST_BLOCK_OFFSETS, 3));
        cache.numBlocks = mTensors.data<int32_t>(kHOST_NUM_BLOCKS)[side];
        cache.tokensPerBlock = mConfig.tokensPerBlock[side];
        return cache;
    }

    // The table on the host is the one that is checked, the one on the device the one that is read.
    Status checkTables(Side side, PagedCache const& cache) const
    {
        int32_t const device = kFIRST_SIDE + side * kINPUTS_PER_SIDE + kBLOCK_OFFSETS;
        int64_t const numSequences = mTensors.dim(device, 1);
        int64_t const maxBlocks = mTensors.dim(device, 3);
        if (cache.numSequences != mSpans.numSequences || numSequences != cache.numSequences
            || maxBlocks != cache.maxBlocks)
        {
            return refuse("There are %d spans; the %s's block offsets are of %d sequences with %d blocks on the host, "
                          "%lld with %lld on the device. One table, and one span for each sequence, are needed.",
                mSpans.numSequences, cache.side, cache.numSequences, cache.maxBlocks,
                static_cast<long long>(numSequences), static_cast<long long>(maxBlocks));
        }
        return Status{};
    }

    Status viewDense()
    {
        int64_t const numSequences = mTensors.dim(kSOURCE_KV, 0);
        int64_t const numTokens = mTensors.dim(kSOURCE_KV, 4);
        if (mSpans.numSequences != numSequences)
        {
            return refuse("source_kv holds %lld sequences and there are %d spans; one for each is needed.",
                static_cast<long long>(numSequences), mSpans.numSequences);
        }
        for (int32_t sequence = 0; sequence < mSpans.numSequences; ++sequence)
        {
            if (mSpans.count(sequence) > numTokens)
            {
                return refuse("The span of sequence %d has %d tokens; source_kv holds %lld of each sequence.", sequence,
                    mSpans.count(sequence), static_cast<long long>(numTokens));
            }
        }
        auto const dtype = [this](Side side) { return static_cast<DType>(mConfig.cacheDtypes[side]); };
        mParams.source = viewDenseCache(mParams.map.source, dtype(kSOURCE_SIDE), mConfig.cacheScales, numSequences,
            numTokens, const_cast<void*>(mTensors.inputs[kSOURCE_KV]));
        mParams.target = viewDenseCache(
            mParams.map.target, dtype(kTARGET_SIDE), mConfig.cacheScales + 2, numSequences, numTokens, mTensors.output);
        return Status{};
    }

    RopeTable ropeOf(int32_t input, Side side) const
    {
        float const* const cos = mTensors.data<float>(input);
        int64_t const numPositions = mTensors.dim(input, 1);
        return RopeTable{cos, cos + numPositions * mTensors.dim(input, 2), numPositions, mConfig.ropeScales[side]};
    }

    void fillRest()
    {
        mParams.map.blob = mTensors.inputs[kPACKED_MAP];
        mParams.sourceRope = ropeOf(kSOURCE_ROPE, kSOURCE_SIDE);
        mParams.targetRope = ropeOf(kTARGET_ROPE, kTARGET_SIDE);
        mParams.sameRotation = mConfig.sameRotation;
        mParams.variant = static_cast<Variant>(mConfig.variant);
        mParams.chunkTokens = mConfig.chunkTokens;
        mWorkspace = layOutWorkspace(mConfig, mParams.map, mTensors.workspace, mParams.span.numTokens);
        mParams.span.sourceSlots = mWorkspace.sourceSlots;
        mParams.span.targetSlots = mWorkspace.targetSlots;
        mParams.span.positions = mWorkspace.positions;
        mParams.span.indexType = IndexType::kINT32;
        mParams.workspace = mWorkspace.map;
        mParams.workspaceBytes = mWorkspace.mapBytes;
    }

    SequenceSlots slotsOf(int32_t sequence, int64_t firstToken) const
    {
        SequenceSlots slots{};
        slots.firstPosition = mSpans.first(sequence);
        slots.numTokens = mSpans.count(sequence);
        slots.sourceSlots = mWorkspace.sourceSlots + firstToken;
        slots.targetSlots = mWorkspace.targetSlots + firstToken;
        slots.positions = mWorkspace.positions + firstToken;
        if (isPaged())
        {
            slots.source = pagedSlots(kSOURCE_SIDE, mSource, sequence);
            slots.target = pagedSlots(kTARGET_SIDE, mTarget, sequence);
            slots.mappedLength = static_cast<int32_t*>(mTensors.output) + sequence;
            slots.numMapped = countMapped(mSource, mTarget, mSpans, sequence);
        }
        else
        {
            slots.source.firstSlot = sequence * mParams.source.tokensPerBlock;
            slots.target.firstSlot = sequence * mParams.target.tokensPerBlock;
        }
        return slots;
    }

    SlotSource pagedSlots(Side side, PagedCache const& cache, int32_t sequence) const
    {
        int32_t const* const offsets = mTensors.data<int32_t>(kFIRST_SIDE + side * kINPUTS_PER_SIDE + kBLOCK_OFFSETS);
        SlotSource slots{};
        slots.blockOffsets = offsets + int64_t{sequence} * 2 * cache.maxBlocks;
        slots.entriesPerBlock = 2 * cache.shape.numLayers;
        slots.tokensPerBlock = cache.tokensPerBlock;
        return slots;
    }

    KvMapConfig const& mConfig;
    Ports const& mPorts;
    Tensors const& mTensors;
    SequenceSpans mSpans;
    PagedCache mSource{};
    PagedCache mTarget{};
    CallWorkspace mWorkspace{};
    MapParams mParams{};
};

} // namespace

Status enqueueMap(
    KvMapConfig const& config, PackedMap const& map, Ports const& ports, Tensors const& tensors, Stream stream)
{
    MapCall call(config, map, ports, tensors);
    Status const status = call.prepare();
    return isOk(status) ? call.launch(stream) : status;
}

int64_t maxTokens(KvMapConfig const& config, nvinfer1::Dims const& sourceKv)
{
    bool const paged = config.mode == static_cast<int32_t>(Mode::kPAGED);
    return paged ? config.maxNumTokens : sourceKv.d[0] * sourceKv.d[4];
}

} // namespace trtllm_kvmap::plugin
