#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "core/divisor.h"
#include "core/math.h"
#include "xqa_decode/params.h"

namespace attnops::xqa_decode {

// What the compiler must know of a kernel. Every warp streams its own chunks of keys through its own ring of stages in
// shared memory; a row tile is 8 query rows, the N of the matrix instruction.
template <typename T_, bool kFp8_, int kHeadDim_, int kRowTiles_, typename Fp8_ = __nv_fp8_e4m3>
struct Traits {
  using T = T_;                               // of both products: fp16 for FP8 pages, whatever the type of q
  static constexpr bool kFp8 = kFp8_;         // pages of Fp8
  using Fp8 = Fp8_;                           // e4m3 or e5m2
  static constexpr int kHeadDim = kHeadDim_;  // head_dim, rounded up
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRows = 8 * kRowTiles;  // query rows of a warp

  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeyBytes = kHeadDim * (kFp8 ? 1 : 2);
  static constexpr int kChunk = kKeyBytes <= 128 || kFp8 ? 32 : 16;  // keys
  static constexpr int kChunkShift = kChunk == 32 ? 5 : 4;
  static constexpr int kKeyTiles = kChunk / 16;
  static constexpr int kStageBytes = 2 * kChunk * kKeyBytes;                             // K and V
  static constexpr int kStages = kStageBytes <= 4096 ? 6 : kStageBytes <= 8192 ? 3 : 2;  // a CTA fits sm_80, too
  static constexpr int kRingBytes = kStages * kStageBytes;                               // of one warp
  static constexpr int kCtasPerSm = kStageBytes <= 8192 ? 2 : 1;
  static_assert(kStageBytes >= kRows * kHeadDim * 4, "a free stage holds a warp's output");

  static constexpr int kVec = 16 / (kFp8 ? 1 : 2);  // elements of 16 bytes
  static constexpr int kVecsPerKey = kKeyBytes / 16;
  static constexpr int kKeysPerCopy = 32 / kVecsPerKey;  // keys that one instruction of a warp copies

  static constexpr int kSteps = kHeadDim / 16;     // of the first product, along the head dim
  static constexpr int kDimTiles = kHeadDim / 16;  // of the second product
  // fp16 probabilities are scaled up by this power of two, so that small ones keep their digits.
  static constexpr float kProbShift = std::is_same_v<T, __half> ? 14.f : 0.f;

  // Where a row's 32-bit pair `at` lies among the queries.
  __device__ static constexpr int query_word(int row, int at) {
    return row * (kHeadDim / 2) + ((at / 4) ^ (row & 7)) * 4 + at % 4;
  }

  // Which 16-byte column a key's column `c` lies in: eight keys' equal columns then fall in different banks.
  __device__ static constexpr int swizzle(int key) { return kKeyBytes >= 128 ? key & 7 : (key >> 1) & 3; }
};

// What a launch knows besides the arguments.
struct Shape {
  int group;       // query heads per KV head
  int rows;        // of a work: seqlen_q * group
  int row_groups;  // warps that share their keys, and have kRows rows each: 1, 2 or 4
  int row_blocks;  // passes over the keys: each serves row_groups * kRows rows
  int page_shift;  // log2(page_size), or -1
  Divisor by_group, by_kv_heads, by_page_size;
  int64_t k_page, k_token, v_page, v_token;  // strides in bytes
  bool heads_side_by_side;                   // of the plan: see plan.h
  int plan_works, plan_groups;               // what its rows number: see SplitKvExtent
  bool vector_keys;                          // rows of K and V start on 16-byte boundaries
  bool same_strides;                         // of K and V
  bool pair_queries;                         // rows of q start on 4-byte boundaries, and head_dim is even
  bool vector_out;                           // rows of out start on 8-byte boundaries, and head_dim is a multiple of 4
  bool wide_partials;                        // head_dim is a multiple of 4
};

// Where things lie in shared memory. Queries and stages begin on multiples of their row size: columns are swizzled by
// exclusive or on the address.
template <class Tr>
struct SharedLayout {
  static constexpr int kStats = 0;                                   // float2 [kWarps][kRows]: maximum and sum
  static constexpr int kFree = kStats + Tr::kWarps * Tr::kRows * 8;  // int [kWarps]: offset of the free stage
  static constexpr int kFlag = kFree + Tr::kWarps * 4;               // MergeFlag
  static constexpr int kGoodKeys = kFlag + 16;  // checked mode, uint32 [kWarps][kStages]: which keys have a page
  static constexpr int kRowScale = kGoodKeys + Tr::kWarps * Tr::kStages * 4;  // float [rows]: of FP8 kernels' queries
  static constexpr int kRing = max_of(1024 * Tr::kWarps / 4, Tr::kHeadDim * 2);
  static constexpr int kQueries = kRing + Tr::kWarps * Tr::kRingBytes;  // T [rows][kHeadDim]
  static_assert(kRowScale + Tr::kWarps * Tr::kRows * 4 <= kRing);
  static constexpr int bytes(int row_groups) { return kQueries + row_groups * Tr::kRows * Tr::kHeadDim * 2; }
};

}  // namespace attnops::xqa_decode
