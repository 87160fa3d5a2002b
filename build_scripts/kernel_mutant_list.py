"""What kernel_mutants.py breaks: one line of a kernel each, and why that is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``old`` stands once in cpp/kernels/``file``; ``why`` says what is then wrong."""

    file: str
    old: str
    new: str
    why: str


GEMM, TILE, STRIP = "groupedGemm.cuh", "finishTile.cuh", "stripRope.cuh"
RESOLVE, COPY, HOST = "resolveTokens.cuh", "copyHeads.cuh", "mapKvCacheCuda.cu"
CELLS, PACK, HOPPER = "cacheElements.cuh", "packMap.cpp", "groupedGemmHopper.cuh"
FLOAT8, LAYOUT, CLUSTER = "float8Weights.cuh", "packedMap.h", "clusterItems.cuh"
ROWS = "finishRows.cuh"

MUTANTS = (
    # The ring of asynchronous copies.
    Mutant(
        GEMM,
        "__syncthreads();\n        if (next < item.endBlock)",
        "if (next < item.endBlock)",
        "no barrier between the wait and the products: other threads' copies are not awaited",
    ),
    Mutant(
        GEMM,
        "cpAsyncWait<Shape::kStages - 2>();",
        "cpAsyncWait<Shape::kStages - 1>();",
        "waits for one group too few: the stage in use has not arrived",
    ),
    Mutant(
        GEMM,
        "    cpAsyncWait<0>();\n    __syncthreads();\n}",
        "    cpAsyncWait<0>();\n}",
        "the ring becomes staging while other warps still multiply from it",
    ),
    Mutant(
        GEMM,
        "        }\n        cpAsyncCommit();\n        fill =",
        "            cpAsyncCommit();\n        }\n        fill =",
        "no empty groups at the end: the constant wait no longer covers the last blocks",
    ),
    Mutant(
        GEMM,
        "fill = fill + Shape::kStageBytes == end ? ring",
        "fill = fill + Shape::kStageBytes >= end - Shape::kStageBytes ? ring",
        "the filled stage wraps one too early",
    ),
    Mutant(
        GEMM,
        "use = use + Shape::kStageBytes == end ? ring : use + Shape::kStageBytes;",
        "",
        "always multiplies the first stage",
    ),
    Mutant(
        GEMM,
        "    __syncthreads();\n    scatterTile<Shape",
        "    scatterTile<Shape",
        "reads the staging tile before every warp has written it",
    ),
    Mutant(
        GEMM,
        "    __syncthreads(); // staging and ring are the same memory\n",
        "",
        "the next item's copies land in a staging tile that is still being read",
    ),
    # Fragments and swizzles.
    Mutant(
        GEMM,
        "mmaM16N8K16<T>(accumulators[i][j], x[i], w[0], w[1]);",
        "mmaM16N8K16<T>(accumulators[i][j], x[i], w[0], w[2]);",
        "fragment of W from two different column groups",
    ),
    Mutant(
        GEMM,
        "int32_t const xChunk = lane / 16;",
        "int32_t const xChunk = lane / 8 % 2;",
        "lanes name the wrong half of x for ldmatrix",
    ),
    Mutant(
        GEMM,
        "int32_t const wChunk = lane / 8 % 2;",
        "int32_t const wChunk = lane / 16;",
        "lanes name the wrong half of W for ldmatrix",
    ),
    Mutant(
        GEMM,
        "+ ((chunk ^ (row & 7)) << 4);",
        "+ ((chunk ^ (row & 3)) << 4);",
        "x is stored under another swizzle than it is read",
    ),
    Mutant(
        GEMM,
        "(((2 * k + wChunk) ^ (wRow & 7)) << 4)",
        "((2 * k + wChunk) << 4)",
        "W is read without the swizzle it was packed with",
    ),
    Mutant(
        GEMM,
        "stage + (xRow + 16 * i) * Shape::kRowBytes",
        "stage + (xRow + 8 * i) * Shape::kRowBytes",
        "the second block of 16 rows begins at row 8",
    ),
    Mutant(
        GEMM,
        "warpRow + 16 * i + 8 * h + lane / 4;",
        "warpRow + 16 * i + h + lane / 4;",
        "epilogue row: the lower half of a fragment is one row down, not eight",
    ),
    Mutant(
        GEMM,
        "warpColumn + 8 * j + 2 * (lane % 4);",
        "warpColumn + 8 * j + 2 * (lane / 8);",
        "epilogue column by the wrong lanes",
    ),
    # Which inputs, which tile.
    Mutant(
        GEMM,
        "own ? chunk - sourceChunks : chunk;",
        "chunk;",
        "own slices are counted from the first source slice",
    ),
    Mutant(
        GEMM,
        "own ? place - args.numSourceSlices : place;",
        "place;",
        "an own slice is looked up behind the source's",
    ),
    Mutant(
        GEMM,
        "group.sliceList + (own ? group.numSourceSlices : 0) + ordinal",
        "group.sliceList + ordinal",
        "own slices read the head of the slice list",
    ),
    Mutant(
        GEMM,
        "* args.chunkTokens + row) * width",
        "* args.numRowTiles * 64 + row) * width",
        "slices of the workspace lie chunkTokens apart, not the rows of this chunk",
    ),
    Mutant(
        GEMM,
        "index % args.numRowTiles * tileRows, rest",
        "0, rest",
        "every row tile is the first",
    ),
    Mutant(
        GEMM,
        "item.group.kBlocks * (split + 1) / args.numSplits",
        "item.group.kBlocks * (split + 1) / args.numSplits - (split > 0)",
        "a split leaves out its last block",
    ),
    Mutant(
        GEMM,
        "split * numTiles + static_cast<int32_t>(blockIdx.x)",
        "split * args.numSplits + static_cast<int32_t>(blockIdx.x)",
        "the sum of the splits takes other tiles' parts",
    ),
    Mutant(
        GEMM,
        "if (own && ordinal >= group.numOwnSlices)",
        "if (own && ordinal > group.numOwnSlices)",
        "reads one slice beyond the list where K is padded",
    ),
    # The end of a tile.
    Mutant(
        TILE,
        "args.rope.cos[angle], args.rope.sin[angle]",
        "args.rope.cos[angle], -args.rope.sin[angle]",
        "the target's RoPE turns backwards",
    ),
    Mutant(
        TILE,
        ".position) * (args.rotaryDim / 2) + pair.rotation",
        ".position) * (args.headDim / 2) + pair.rotation",
        "row pitch of the RoPE table: head_dim instead of rotary_dim",
    ),
    Mutant(
        TILE,
        "args.bias[group.bias + inGroup + 1]",
        "args.bias[group.bias + inGroup]",
        "both channels of a pair get the first one's bias",
    ),
    Mutant(
        TILE,
        "(inHead & kVector ? turning / 2 : 0)",
        "(inHead & kVector ? args.headDim / 2 : 0)",
        "the upper half of a partially rotated head lands too far up",
    ),
    Mutant(
        TILE,
        "(inTile & ~15) + (inTile & 15) / 2 : inTile",
        "(inTile & ~15) + (inTile & 7) / 2 : inTile",
        "columns overwrite each other when pairs are untangled",
    ),
    Mutant(
        TILE,
        "args.headLists[group.headList + inGroup / args.headDim]",
        "inGroup / args.headDim",
        "head order: a group's heads are taken to be 0, 1, 2 ...",
    ),
    Mutant(
        TILE,
        "if (token.sourceBlock < 0 || inGroup",
        "if (inGroup",
        "skipped tokens and the rows that fill up a tile are written",
    ),
    Mutant(
        TILE,
        "headOffset(view, token.targetBlock, head, token.targetOffset)",
        "headOffset(view, token.sourceBlock, head, token.targetOffset)",
        "page: the source's block in the target's pool",
    ),
    Mutant(
        TILE,
        "view.dtype, view.inverseScale, y);",
        "view.dtype, view.scale, y);",
        "fp8: multiplied by the scale instead of divided",
    ),
    # Stripping and resolving.
    Mutant(
        STRIP,
        "float const sin = -args.rope.sin[pair + i];",
        "float const sin = args.rope.sin[pair + i];",
        "the source's RoPE is put on twice",
    ),
    Mutant(
        STRIP,
        "split ? turning / 2 + first : first + kWidth;",
        "split ? args.shape.headDim / 2 + first : first + kWidth;",
        "partner of a pair under partial rotary",
    ),
    Mutant(
        STRIP,
        "row.sourceBlock, s.head, row.sourceOffset)",
        "row.sourceBlock, s.head, row.targetOffset)",
        "page: the target's offset in the source's block",
    ),
    Mutant(
        STRIP,
        "shape.numKvHeads + s.head) * shape.headDim",
        "shape.numKvHeads + s.head + 1) * shape.headDim",
        "the token table is read one head further",
    ),
    Mutant(
        RESOLVE,
        "target % args.targetTokensPerBlock",
        "target % args.sourceTokensPerBlock",
        "page arithmetic with the other pool's tokens_per_block",
    ),
    Mutant(
        RESOLVE,
        "source / args.sourceTokensPerBlock",
        "(source + 1) / args.sourceTokensPerBlock",
        "off by one page at a block's last token",
    ),
    Mutant(
        RESOLVE,
        "int64_t const token = args.firstToken + index;",
        "int64_t const token = index;",
        "every chunk maps the first tokens",
    ),
    Mutant(
        HOST,
        "args.inverseRopeScale = 1.0f / mParams.sourceRope.scale;",
        "args.inverseRopeScale = mParams.sourceRope.scale;",
        "the source's attention_factor is multiplied in, not divided out",
    ),
    Mutant(
        HOST,
        "narrow ? mMap.narrowTiles : mMap.wideTiles",
        "narrow ? mMap.wideTiles : mMap.wideTiles",
        "narrow tiles from the table of wide ones",
    ),
    Mutant(
        HOST,
        "args.takesVectors = takesVectors(mParams.target) && turnsInVectors",
        "args.takesVectors = turnsInVectors",
        "16-byte stores into a pool whose strides do not allow them",
    ),
    # Copies, formats, packing.
    Mutant(
        COPY,
        "copy.plain && (!isKey || args.sameRotation)",
        "copy.plain",
        "copied keys keep a rotation that the target does not use",
    ),
    Mutant(
        COPY,
        "    float const sin = rope.sin[pair];",
        "    float const sin = rope.sin[pair + 1 - 2 * (i & 1)];",
        "neighbouring pairs exchange their sines",
    ),
    Mutant(
        COPY,
        "    int32_t const half = shape.rotaryDim / 2;\n    __syncwarp();",
        "    int32_t const half = shape.rotaryDim / 2;",
        "a head is turned before all of it is there",
    ),
    Mutant(
        COPY,
        "if (asStored && args.sameNumbers)",
        "if (asStored)",
        "bits are moved between caches of different dtype or scale",
    ),
    Mutant(
        CELLS,
        "packed.x : packed.y) >> (8 * (i % 4))",
        "packed.y : packed.x) >> (8 * (i % 4))",
        "fp8: the two halves of eight channels change places",
    ),
    Mutant(
        CELLS,
        "words[i / 2] >> (16 * (i % 2)) & 0xffffu",
        "words[i / 2] >> (16 * (1 - i % 2)) & 0xffffu",
        "half precision: neighbours change places",
    ),
    Mutant(
        PACK,
        "given.bias[columnOf[n]]",
        "given.bias[n]",
        "the bias keeps the order of channels where the columns do not",
    ),
    # Weights in fp8-e4m3.
    Mutant(
        GEMM,
        "widenFloat8<T>(codes[n] << 8);",
        "widenFloat8<T>(codes[n]);",
        "both halves of a step get the weights of the first",
    ),
    Mutant(
        GEMM,
        "((k ^ (row / 2 & 3)) << 4)",
        "((k ^ (row & 3)) << 4)",
        "fp8 weights are read under another swizzle than they are packed with",
    ),
    Mutant(
        GEMM,
        "+ packed * Shape::kWeightBytes + piece",
        "+ packed * 2 + piece",
        "fp8 blocks taken to lie as far apart as those of two bytes a weight",
    ),
    Mutant(
        FLOAT8,
        "0x3f803f80u) | (codes & 0x80008000u)",
        "0x3f803f80u) | (codes & 0x00008000u)",
        "the upper weight of a pair loses its sign in fp16",
    ),
    Mutant(
        FLOAT8,
        "kPowersOf120 = 0x7b807b80u",
        "kPowersOf120 = 0x7b007b00u",
        "the bias is one short: half of each weight",
    ),
    Mutant(
        TILE,
        "__fmaf_rn(second, pair.scale[1], pair.bias[1])",
        "__fmaf_rn(second, pair.scale[0], pair.bias[1])",
        "both channels of a pair get the first one's scale",
    ),
    Mutant(
        PACK,
        "given.scale ? given.scale[columnOf[n]] : 1.0f",
        "given.scale ? given.scale[n] : 1.0f",
        "scales keep the order of channels where the columns do not",
    ),
    Mutant(
        LAYOUT,
        "i % 8 / 2 * 4 + i % 2 * 2 + (i < 8 ? 1 : 0)",
        "i % 8 / 2 * 4 + i % 2 * 2 + (i < 8 ? 0 : 1)",
        "the halves of a step of 16 inputs change places",
    ),
    # Hopper.
    Mutant(
        HOPPER,
        "        mbarrierWait(ring.full(place.stage), place.parity);\n",
        "",
        "multiplies a stage before its boxes have landed",
    ),
    Mutant(
        HOPPER,
        "mbarrierWait(ring.empty(place.stage), place.parity ^ 1);",
        "",
        "copies over a stage that is still being read",
    ),
    Mutant(
        HOPPER,
        "if (speaks && block > work.firstBlock)\n        {\n"
        "            releaseStage(ring, last, rank);",
        "if (speaks && block > work.firstBlock)\n        {\n"
        "            releaseStage(ring, place.stage, rank);",
        "gives back the stage whose products have just been started",
    ),
    Mutant(
        HOPPER,
        "wgmmaDescriptor(inputs + p * 64 * kBlockInputs * 2 + 32 * k)",
        "wgmmaDescriptor(inputs + p * 64 * kBlockInputs * 2 + 16 * k)",
        "steps of K are taken 8 inputs apart",
    ),
    Mutant(
        HOPPER,
        "row = warpRow + 64 * p;",
        "row = warpRow + 16 * p;",
        "epilogue row of the second product",
    ),
    Mutant(
        HOPPER,
        "(packed + n * group.kBlocks) * kBlockColumns",
        "(packed + n) * kBlockColumns",
        "the second 64 columns read the next block of K of the first",
    ),
    Mutant(
        HOPPER,
        "int32_t const column = within - ordinal * width;",
        "int32_t const column = 0;",
        "every K-block is the first of its slice",
    ),
    # Hopper: two blocks that share.
    Mutant(
        HOPPER,
        "    mbarrierArriveCluster(mapShared(ring.empty(stage), rank ^ 1));\n",
        "",
        "the other block is not told that a stage has been read here",
    ),
    Mutant(
        HOPPER,
        "mapShared(ring.empty(stage), rank ^ 1)",
        "mapShared(ring.empty(stage), rank)",
        "the other block's arrival goes to the own barrier",
    ),
    Mutant(
        HOPPER,
        "    mbarrierArrive(ring.empty(stage));\n",
        "",
        "the own copies are not told that a stage has been read",
    ),
    Mutant(
        HOPPER,
        "mbarrierInit(ring.empty(s), kClusterBlocks * HopperShape::kWarpgroups);",
        "mbarrierInit(ring.empty(s), HopperShape::kWarpgroups);",
        "half of the four warpgroups are enough to overwrite a stage in both blocks",
    ),
    Mutant(
        HOPPER,
        "constexpr uint16_t kBOTH = (1 << kClusterBlocks) - 1;",
        "uint16_t const kBOTH = 1 << rank;",
        "mask: what is shared goes to the own block alone",
    ),
    Mutant(
        HOPPER,
        "constexpr uint16_t kBOTH = (1 << kClusterBlocks) - 1;",
        "uint16_t const kBOTH = 2 >> rank;",
        "mask: what is shared goes to the other block alone",
    ),
    Mutant(
        HOPPER,
        "kBOTH = (1 << kClusterBlocks) - 1;",
        "kBOTH = (2 << kClusterBlocks) - 1;",
        "mask: a third block, which is not there",
    ),
    Mutant(
        HOPPER,
        "mbarrierArriveExpectBytes(full, HopperShape::kInputBytes + numBlocks",
        "mbarrierArriveExpectBytes(full, (item.sharesInputs ? HopperShape::kBoxBytes : "
        "HopperShape::kInputBytes) + numBlocks",
        "the half of the inputs that the other block copies is not waited for",
    ),
    Mutant(
        HOPPER,
        "mbarrierArriveExpectBytes(full, HopperShape::kInputBytes + numBlocks *",
        "mbarrierArriveExpectBytes(full, HopperShape::kInputBytes + 2 *",
        "waits for the bytes of a second 64 columns that the group does not have",
    ),
    Mutant(
        HOPPER,
        "row + rank * HopperShape::kBoxRows, full,",
        "row, full,",
        "both blocks copy the upper half of the inputs",
    ),
    Mutant(
        HOPPER,
        "tmaMulticast2D(stage + rank * HopperShape::kBoxBytes, inputs",
        "tmaMulticast2D(stage, inputs",
        "both halves of the inputs land in one place",
    ),
    Mutant(
        HOPPER,
        "(packed + rank * group.kBlocks) * kBlockColumns",
        "packed * kBlockColumns",
        "both blocks copy the first 64 columns of shared weights",
    ),
    Mutant(
        HOPPER,
        "if (rank < numBlocks)",
        "if (numBlocks == 2)",
        "a tile of 64 columns gets no weights where they are shared",
    ),
    Mutant(
        CLUSTER,
        "right < args.numTiles && args.tiles[left].group == args.tiles[right].group;",
        "right < args.numTiles;",
        "tiles of two groups share inputs that only one of them reads",
    ),
    Mutant(
        CLUSTER,
        "left + step / (steps / 2)",
        "left",
        "of two tiles that share nothing the second is never multiplied",
    ),
    Mutant(
        CLUSTER,
        "return (args.numRowTiles + 1) / 2 * 2;",
        "return args.numRowTiles / 2 * 2 + 2 * (args.numRowTiles < 2);",
        "the last of an odd number of row tiles is left out",
    ),
    Mutant(
        CLUSTER,
        "item.exists = rowTile < args.numRowTiles;",
        "item.exists = true;",
        "a block without a row tile writes out what it does not have",
    ),
    Mutant(
        HOPPER,
        "syncCluster(); // the other block's mbarriers are there too",
        "__syncthreads();",
        "copies to a block whose mbarriers may not be there yet",
    ),
    Mutant(
        HOPPER,
        "    syncCluster(); // until then the other block arrives here\n",
        "",
        "a block ends while the other still arrives at its barriers",
    ),
    # Hopper: rows that leave through a warp's own staging.
    Mutant(
        ROWS,
        "        __syncwarp();\n        writeHeadRows<",
        "        writeHeadRows<",
        "rows of a head are written before every lane has staged them",
    ),
    Mutant(
        ROWS,
        "        __syncwarp();\n        writeTileRows<",
        "        writeTileRows<",
        "rows are written before every lane has staged them",
    ),
    Mutant(
        ROWS,
        "    __syncwarp(); // the next rows take their place\n",
        "",
        "the next rows are staged over those still being written",
    ),
    Mutant(
        ROWS,
        "(moves ? j % 2 * 4 : 0)",
        "0",
        "channels of a head that turns overwrite each other in staging",
    ),
    Mutant(
        ROWS,
        "(args.rotaryDim / 2) + lane % 4;",
        "(args.rotaryDim / 2);",
        "four pairs turn by the angle of the first",
    ),
    Mutant(
        ROWS,
        "turns ? sin[4 * j] : 0.0f",
        "turns ? sin[4 * first] : 0.0f",
        "four steps of eight columns take the first one's sine",
    ),
    Mutant(
        ROWS,
        "bias[n][1] = biases[8 * j + 1];",
        "bias[n][1] = biases[8 * j];",
        "both channels of a pair of a head get the first one's bias",
    ),
    Mutant(
        ROWS,
        "args.headLists[group.headList + column / kColumns]",
        "args.headLists[group.headList]",
        "every tile is the first head of its group",
    ),
    Mutant(
        ROWS,
        "if (token.sourceBlock < 0)",
        "if (token.sourceBlock < -9)",
        "skipped tokens and the rows that fill up a tile of a head are written",
    ),
    Mutant(
        HOPPER,
        "thread / 32 * HopperShape::kWarpStagingBytes",
        "thread / 64 * HopperShape::kWarpStagingBytes",
        "two warps stage in one place",
    ),
    Mutant(
        HOPPER,
        "shared + HopperShape::kRingBytes + thread",
        "shared + thread",
        "staging in the ring, where the next item's boxes land",
    ),
)
