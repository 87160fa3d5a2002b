// map_kv: a source model's KV blocks become a target model's KV blocks, in place, in paged pools.
//
// Plain structs, raw pointers and a stream. Nothing here throws, allocates, synchronises or keeps state: a caller packs
// a map once (packMap), asks how much workspace a span needs (workspaceSize), and calls mapKvCache as often as it likes,
// inside a CUDA graph if it likes. All strides are in elements, all sizes in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st; // what a cudaStream_t points to, so that this header needs no CUDA

namespace trtllm_kvmap
{

using Stream = CUstream_st*;

constexpr int32_t kMaxLayers = 128;
constexpr int32_t kMaxHeadDim = 256;
constexpr int32_t kPackedMapVersion = 2;

enum class DType : int32_t
{
    kFLOAT32 = 0,
    kFLOAT16 = 1,
    kBFLOAT16 = 2,
    kFP8_E4M3 = 3,
};

enum class IndexType : int32_t
{
    kINT32 = 0,
    kINT64 = 1,
};

enum class Field : int32_t
{
    kKEY = 0,
    kVALUE = 1,
};

// Whose cache a slice is read from. A slice of the target is its own layer 0, a function of the token id alone.
enum class Origin : int32_t
{
    kSOURCE = 0,
    kTARGET = 1,
};

// Which kernel multiplies. All give the contract's result; kAUTO picks by token count and by the map's shape.
enum class Variant : int32_t
{
    kAUTO = 0,
    kWIDE = 1,    // tiles of 256 tokens x 128 columns: pooled maps, heads of 128
    kNARROW = 2,  // 128 x 64: heads of 64 and less, or a hundred tokens
    kSMALL_T = 3, // 64 x 128, weights streamed once, split along K: a handful of tokens
    kHOPPER = 4,  // 256 x 128 by wgmma and TMA: bf16 weights, heads of whole 64, sm_90a. Only on request
};

enum class StatusCode : int32_t
{
    kOK = 0,
    kINVALID_ARGUMENT = 1, // the call was refused; nothing was launched or written
    kCUDA_ERROR = 2,       // a launch failed; the sentence names it
    kUNSUPPORTED = 3,      // this build or this device cannot do it
};

struct Status
{
    StatusCode code;
    char sentence[256]; // what was given and what is needed; empty when code is kOK
};

// ---- the map -------------------------------------------------------------------------------------------------------

// One model's KV geometry. rotaryDim channels of each key head turn, paired (2i, 2i + 1) when interleaved, else
// (i, i + rotaryDim / 2). headDim and rotaryDim are even, headDim <= kMaxHeadDim.
struct ModelShape
{
    int32_t numLayers;
    int32_t numKvHeads;
    int32_t headDim;
    int32_t rotaryDim;
    int32_t interleaved; // 0 or 1
};

// One (key or value, layer, KV head) of a cache: headDim columns a map reads.
struct Slice
{
    Origin origin;
    Field field;
    int32_t layer;
    int32_t head;
};

// Target heads of one layer and field that read the same slices with one matrix, as a KvMap holds them.
struct MapGroupSpec
{
    Field field;
    int32_t layer;
    int32_t numHeads;
    int32_t numSlices;
    int32_t const* heads; // [numHeads]
    Slice const* slices;  // [numSlices]
    float const* weight;  // [sum of slice widths, numHeads * headDim], row-major; null: copy slice i to head i
    float const* bias;    // [numHeads * headDim]; null exactly when weight is
    float const* scale;   // [numHeads * headDim], a factor for each column of weight; null: all are 1
};

struct MapSpec
{
    ModelShape source;
    ModelShape target;
    DType computeType; // of the products and of the workspace: bf16 or fp16 (tensor cores), or fp32
    DType weightType;  // as they are kept: computeType, or fp8-e4m3, whose columns are scaled after the sum
    int32_t numGroups;
    MapGroupSpec const* groups; // together they cover every (layer, field, head) of the target at most once
};

// A packed map: one buffer (docs/kernels.md draws it) and where its tables begin. packMap fills everything; a caller
// that copies the buffer to a GPU sets `blob` to the copy's address, which must be aligned to 64 bytes.
struct PackedMap
{
    int32_t version;
    DType computeType;
    DType weightType;
    ModelShape source;
    ModelShape target;
    int32_t numGroups;       // groups with a matrix
    int32_t numCopies;       // target heads that are copied
    int32_t numSlices;       // distinct slices that groups with a matrix read: the source's, then the target's own
    int32_t numSourceSlices; // how many of them are the source's
    int32_t numWideTiles;    // column tiles of 128 over all groups
    int32_t numNarrowTiles;  // column tiles of 64
    int32_t maxKBlocks;      // most blocks of 64 inputs that a group has
    int32_t readsTokenIds;   // 1 when any slice is the target's own
    int64_t groups;          // byte offsets into blob
    int64_t copies;
    int64_t slices;
    int64_t sliceLists;
    int64_t headLists;
    int64_t wideTiles;
    int64_t narrowTiles;
    int64_t bias;
    int64_t scales; // of columns, where bias has theirs; fp8-e4m3 weights only
    int64_t weights;
    int64_t bytes; // of the whole buffer
    void const* blob;
};

// Bytes packMap needs; refuses what packMap would refuse.
Status packedMapSize(MapSpec const& spec, size_t* bytes);

// Lay `spec` out in `blob` (host memory, at least packedMapSize bytes). Weights, times their scale unless that is kept
// beside fp8-e4m3, are rounded once, to weightType.
Status packMap(MapSpec const& spec, void* blob, size_t bytes, PackedMap* map);

// ---- one call ------------------------------------------------------------------------------------------------------

// A pool of KV blocks. An element lies at layers[field][layer] + block * blockStride + head * headStride
// + offset * tokenStride + channel * channelStride, where slot = block * tokensPerBlock + offset. Keys are rotated.
// real number = stored number * scale[field]; scales are 1 except for fp8.
struct PoolView
{
    void* layers[2][kMaxLayers];
    int64_t blockStride;
    int64_t headStride;
    int64_t tokenStride;
    int64_t channelStride;
    int32_t numBlocks;
    int32_t numLayers;
    int32_t numKvHeads;
    int32_t tokensPerBlock;
    int32_t headDim;
    DType dtype;
    float scale[2];
};

// The tokens of one call. A slot of -1 on either side skips its token; so does, in kernels, any index out of range:
// device arrays cannot be checked from the host, and no stray byte may be touched. No target slot may occur twice.
struct Span
{
    void const* sourceSlots; // [numTokens] of indexType, as all four
    void const* targetSlots;
    void const* positions;
    void const* tokenIds; // may be null unless the map reads the target's own slices
    int64_t numTokens;
    IndexType indexType;
};

// cos and sin, float [numPositions, rotaryDim / 2]. A key is written as scale * (a cos - b sin, b cos + a sin).
struct RopeTable
{
    float const* cos;
    float const* sin;
    int64_t numPositions;
    float scale;
};

// The target's layer 0 by token id: pre-RoPE keys and values, contiguous [vocabSize, numKvHeads, headDim].
struct TokenTable
{
    void const* fields[2];
    int64_t vocabSize;
    DType dtype;
};

struct MapParams
{
    PackedMap map;
    PoolView source;
    PoolView target;
    Span span;
    RopeTable sourceRope;
    RopeTable targetRope;
    TokenTable tokenTable;
    // 1 when both models rotate this span's keys alike: copied keys are then moved as they are.
    int32_t sameRotation;
    Variant variant;
    // Tokens mapped at a time; bounds the workspace. 0: kDefaultChunkTokens. Rounded up to whole tiles.
    int32_t chunkTokens;
    void* workspace; // aligned to 256 bytes
    size_t workspaceBytes;
};

constexpr int32_t kDefaultChunkTokens = 2048;

// Exactly the workspace that mapKvCache touches for such a call, a pure function of its arguments: no device is asked.
size_t workspaceSize(PackedMap const& map, int64_t numTokens, int32_t chunkTokens, Variant variant);

// Everything that can be known on the host. Reads no device memory.
Status validate(MapParams const& params);

// validate, then enqueue on `stream`. All pointers are device memory. An empty span does nothing.
Status mapKvCache(MapParams const& params, Stream stream);

// The plain formula, scalar, at once, all pointers host memory. Needs no workspace and has no other rounding than the
// last; also takes float32 maps.
Status mapKvCacheCpu(MapParams const& params);

} // namespace trtllm_kvmap
