// mapKvCache on a GPU: for every chunk of tokens, resolve, strip, multiply (and sum the splits), copy.

#include "kernels/copyHeads.cuh"
#include "kernels/groupedGemm.cuh"
#include "kernels/launchKernel.cuh"
#include "kernels/mapKvCacheHopper.h"
#include "kernels/multiprocessors.cuh"
#include "kernels/plainGemm.cuh"
#include "kernels/resolveTokens.cuh"
#include "kernels/status.h"
#include "kernels/stripRope.cuh"

namespace trtllm_kvmap
{
namespace
{

using namespace kernels;

int32_t blocksFor(int64_t items, int32_t perBlock)
{
    return static_cast<int32_t>((items + perBlock - 1) / perBlock);
}

//! Whether the RoPE pairs of a head fall into whole vectors.
bool turnsInVectors(ModelShape const& shape)
{
    return shape.headDim % kVector == 0 && shape.rotaryDim % (2 * kVector) == 0;
}

bool tokensTakeVectors(TokenTable const& own, ModelShape const& shape)
{
    auto const addresses = reinterpret_cast<uintptr_t>(own.fields[0]) | reinterpret_cast<uintptr_t>(own.fields[1]);
    return addresses % 16 == 0 && shape.headDim % kVector == 0;
}

//! The launches of one call. Each returns nullptr, or what went wrong.
class Call
{
public:
    Call(MapParams const& params, Stream stream)
        : mParams(params)
        , mMap(params.map)
        , mLayout(layOutWorkspace(params.map, params.span.numTokens, params.chunkTokens, params.variant))
        , mStream(stream)
    {
    }

    char const* run()
    {
        int64_t const numTokens = mParams.span.numTokens;
        char const* error = nullptr;
        for (int64_t first = 0; !error && first < numTokens; first += mLayout.chunkTokens)
        {
            mFirstToken = first;
            mNumTokens = static_cast<int32_t>(std::min<int64_t>(numTokens - first, mLayout.chunkTokens));
            mNumRows = static_cast<int32_t>(roundUp(mNumTokens, mLayout.tileRows));
            error = resolve();
            error = error ? error : strip();
            error = error ? error : multiply();
            error = error ? error : copy(Field::kKEY);
            error = error ? error : copy(Field::kVALUE);
        }
        return error;
    }

private:
    template <typename T>
    T* workspace(int64_t offset) const
    {
        return reinterpret_cast<T*>(static_cast<char*>(mParams.workspace) + offset);
    }

    int64_t numPositions() const
    {
        int64_t const everywhere = INT32_MAX;
        return std::min(mMap.source.rotaryDim ? mParams.sourceRope.numPositions : everywhere,
            mMap.target.rotaryDim ? mParams.targetRope.numPositions : everywhere);
    }

    char const* resolve()
    {
        PoolView const& source = mParams.source;
        PoolView const& target = mParams.target;
        ResolveArgs args{};
        args.span = mParams.span;
        args.firstToken = mFirstToken;
        args.numTokens = mNumTokens;
        args.numRows = mNumRows;
        args.sourceTokensPerBlock = source.tokensPerBlock;
        args.targetTokensPerBlock = target.tokensPerBlock;
        args.sourceSlots = int64_t{source.numBlocks} * source.tokensPerBlock;
        args.targetSlots = int64_t{target.numBlocks} * target.tokensPerBlock;
        args.numPositions = numPositions();
        args.vocabSize = mMap.readsTokenIds ? mParams.tokenTable.vocabSize : 0;
        args.rows = workspace<TokenRow>(mLayout.rows);
        return launchKernel(resolveTokens, blocksFor(mNumRows, kResolveThreads), kResolveThreads, 0, mStream, args);
    }

    char const* strip()
    {
        int32_t const numOwn = mMap.numSlices - mMap.numSourceSlices;
        bool const sourceVectors = takesVectors(mParams.source) && turnsInVectors(mMap.source);
        bool const ownVectors = tokensTakeVectors(mParams.tokenTable, mMap.target);
        char const* error = stripSlices(mMap.source, 0, mMap.numSourceSlices, mLayout.source, sourceVectors);
        return error ? error : stripSlices(mMap.target, mMap.numSourceSlices, numOwn, mLayout.own, ownVectors);
    }

    char const* stripSlices(ModelShape const& shape, int32_t first, int32_t count, int64_t out, bool vectors)
    {
        if (count == 0)
        {
            return nullptr;
        }
        StripArgs args{};
        args.source[0] = fieldView(mParams.source, Field::kKEY);
        args.source[1] = fieldView(mParams.source, Field::kVALUE);
        args.own = mParams.tokenTable;
        args.slices = table<Slice>(mMap, mMap.slices) + first;
        args.rows = workspace<TokenRow>(mLayout.rows);
        args.out = workspace<char>(out);
        args.outType = mMap.computeType;
        args.shape = shape;
        args.rope = mParams.sourceRope;
        args.inverseRopeScale = 1.0f / mParams.sourceRope.scale;
        args.chunkTokens = mLayout.chunkTokens;
        args.numRows = mNumRows;
        args.width = sliceWidth(shape);
        int32_t const width = vectors ? kVector : 1;
        int64_t const units = int64_t{mNumRows} * blocksFor(args.width, 2 * width);
        dim3 const grid(blocksFor(units, kStripThreads), count);
        return launchKernel(
            vectors ? stripRope<kVector> : stripRope<1>, grid, kStripThreads, 0, mStream, args);
    }

    bool keepsFloat8() const
    {
        return mMap.weightType == DType::kFP8_E4M3;
    }

    GemmArgs gemmArgs() const
    {
        bool const narrow = mLayout.variant == Variant::kNARROW;
        GemmArgs args{};
        args.target[0] = fieldView(mParams.target, Field::kKEY);
        args.target[1] = fieldView(mParams.target, Field::kVALUE);
        args.groups = table<MapGroup>(mMap, mMap.groups);
        args.sliceLists = table<int32_t>(mMap, mMap.sliceLists);
        args.headLists = table<int32_t>(mMap, mMap.headLists);
        args.tiles = table<Tile>(mMap, narrow ? mMap.narrowTiles : mMap.wideTiles);
        args.bias = table<float>(mMap, mMap.bias);
        args.scales = table<float>(mMap, mMap.scales);
        args.weights = table<char>(mMap, mMap.weights);
        args.rows = workspace<TokenRow>(mLayout.rows);
        args.source = workspace<char>(mLayout.source);
        args.own = workspace<char>(mLayout.own);
        args.partials = workspace<float>(mLayout.partials);
        args.rope = mParams.targetRope;
        args.numSourceSlices = mMap.numSourceSlices;
        args.sourceWidth = sliceWidth(mMap.source);
        args.ownWidth = sliceWidth(mMap.target);
        args.chunkTokens = mLayout.chunkTokens;
        args.numRowTiles = mNumRows / mLayout.tileRows;
        args.numTiles = mLayout.numTiles;
        args.numSplits = mLayout.numSplits;
        args.headDim = mMap.target.headDim;
        args.rotaryDim = mMap.target.rotaryDim;
        args.interleaved = mMap.target.interleaved;
        // Half-split columns are untangled 16 at a time, so a head must begin at a multiple of 16.
        bool const aligned = mMap.target.headDim % (mMap.target.interleaved ? kVector : 2 * kVector) == 0;
        args.takesVectors = takesVectors(mParams.target) && turnsInVectors(mMap.target) && aligned;
        return args;
    }

    //! A grid of as many blocks as can be resident, or as there are items.
    int32_t persistentBlocks(int64_t items, int32_t perMultiprocessor) const
    {
        int64_t const resident = int64_t{perMultiprocessor} * multiprocessorCount();
        return static_cast<int32_t>(resident > 0 ? std::min(items, resident) : items);
    }

    char const* multiply()
    {
        if (mLayout.numTiles == 0)
        {
            return nullptr;
        }
        GemmArgs const args = gemmArgs();
        if (mLayout.variant == Variant::kHOPPER)
        {
            return multiplyHopper(mMap, args, mStream);
        }
        switch (mMap.computeType)
        {
        case DType::kFLOAT32:
            return launchKernel(keepsFloat8() ? plainGemm<1> : plainGemm<4>,
                persistentBlocks(int64_t{args.numRowTiles} * args.numTiles, PlainShape::kResident), kGemmThreads,
                PlainShape::kSharedBytes, mStream, args);
        case DType::kFLOAT16:
            return keepsFloat8() ? multiplyAs<__half, 1>(args) : multiplyAs<__half, 2>(args);
        default:
            return keepsFloat8() ? multiplyAs<__nv_bfloat16, 1>(args) : multiplyAs<__nv_bfloat16, 2>(args);
        }
    }

    template <typename T, int kWeightBytes>
    char const* multiplyAs(GemmArgs const& args)
    {
        switch (mLayout.variant)
        {
        case Variant::kNARROW:
            return multiplyIn<T, NarrowShape<kWeightBytes>>(args);
        case Variant::kSMALL_T:
            return multiplyIn<T, SmallTShape<kWeightBytes>>(args);
        default:
            return multiplyIn<T, WideShape<kWeightBytes>>(args);
        }
    }

    template <typename T, typename Shape>
    char const* multiplyIn(GemmArgs const& args)
    {
        int64_t const tiles = int64_t{args.numRowTiles} * args.numTiles;
        int32_t const blocks = persistentBlocks(tiles * args.numSplits, Shape::kResident);
        char const* const error
            = launchKernel(groupedGemm<T, Shape>, blocks, kGemmThreads, Shape::kSharedBytes, mStream, args);
        if constexpr (Shape::kSplitsK)
        {
            if (!error && args.numSplits > 1)
            {
                return launchKernel(finishSplits<Shape>, static_cast<int32_t>(tiles), kGemmThreads,
                    Shape::kStagingBytes, mStream, args);
            }
        }
        return error;
    }

    char const* copy(Field field)
    {
        if (mMap.numCopies == 0)
        {
            return nullptr;
        }
        int32_t const f = static_cast<int32_t>(field);
        CopyArgs args{};
        args.source[0] = fieldView(mParams.source, Field::kKEY);
        args.source[1] = fieldView(mParams.source, Field::kVALUE);
        args.target = fieldView(mParams.target, field);
        args.field = field;
        args.own = mParams.tokenTable;
        args.copies = table<CopyHead>(mMap, mMap.copies);
        args.rows = workspace<TokenRow>(mLayout.rows);
        args.sourceShape = mMap.source;
        args.targetShape = mMap.target;
        args.sourceRope = mParams.sourceRope;
        args.targetRope = mParams.targetRope;
        args.inverseSourceRopeScale = 1.0f / mParams.sourceRope.scale;
        args.sameRotation = mParams.sameRotation;
        args.sameNumbers = mParams.source.dtype == mParams.target.dtype
            && mParams.source.scale[f] == mParams.target.scale[f];
        args.takesVectors = takesVectors(mParams.source) && takesVectors(mParams.target);
        args.numRows = mNumTokens;
        dim3 const grid(blocksFor(mNumTokens, kCopyWarps), mMap.numCopies);
        return launchKernel(copyHeads, grid, kCopyThreads, kCopySharedBytes, mStream, args);
    }

    MapParams const& mParams;
    PackedMap const& mMap;
    WorkspaceLayout const mLayout;
    Stream const mStream;
    int64_t mFirstToken{0};
    int32_t mNumTokens{0};
    int32_t mNumRows{0};
};

} // namespace

Status mapKvCache(MapParams const& params, Stream stream)
{
    Status const status = validate(params);
    if (!isOk(status) || params.span.numTokens == 0)
    {
        return status;
    }
    if (params.variant == Variant::kHOPPER)
    {
        if (char const* const refusal = kernels::hopperRefusal(params.map))
        {
            return makeStatus(StatusCode::kUNSUPPORTED, "This call cannot be made: %s.", refusal);
        }
    }
    char const* const error = Call(params, stream).run();
    return error ? makeStatus(StatusCode::kCUDA_ERROR, "A launch failed: %s.", error) : okStatus();
}

} // namespace trtllm_kvmap
