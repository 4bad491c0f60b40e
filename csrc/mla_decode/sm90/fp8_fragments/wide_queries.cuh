#pragma once
#include "mla_decode/sm90/fp8_fragments/queries.cuh"
#include "mla_decode/sm90/fp8_fragments/wide_layout.h"
#include "mla_decode/sm90/raw_queries.cuh"

namespace attnops::mla_decode::sm90::fp8_fragments {

// The rows of a piece as queries.cuh stores them, by kQueryThreads, eight rows a warp. Rows that the piece does not
// have are zeros. What the scores of a row must be multiplied by goes to `scales`.
//
// Rows of bf16 become fp16 as they are, if that loses nothing that their largest value would show; their largest is
// known when they are written. Any other row is written once more, times a power of two.
template <typename T, class At>
__device__ inline void convert_queries(const uint8_t* first, const uint8_t* second, uint32_t queries, float* scales) {
  constexpr bool kScales = !std::is_same_v<T, __half>;
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // places that were kept from piece to piece would be spilled
  const int row = thread / 4, quad = thread % 4;
  if (At::kRows < kPlanRows && row >= At::kRows) return;
  const RawQueryRow<At::kFormat != Format::kShared> raw(first, second, row, quad);
  float factor = 1.f, inverse = 1.f;
  uint32_t top = 0;
  const auto convert = [&](const QueryChunk& x, int piece, int upper) {
    if (kScales) raw.follow(x, top);
    const uint32_t place = queries + piece * At::kQueryPiece;
    if (At::kScaled && piece == At::kPieces - 1) {  // K's rope part is 16 bit, and in order
      const uint32_t own = place + attnops::sm90::swizzled(row, upper * 4 + quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 value = unpack_pair(x.pair[i], T{});
        store_shared32(own + 4 * i, attnops::sm90::pack_pair<T>(value.x * factor, value.y * factor));
      }
      return;
    }
    const int chunk = upper * 4 + quad / 2 * 2;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = query_pair<T>(x.pair[i], factor);
    store_shared(place + attnops::sm90::swizzled(row, chunk) + quad % 2 * 8, pairs[0], pairs[2]);
    store_shared(place + attnops::sm90::swizzled(row, chunk + 1) + quad % 2 * 8, pairs[1], pairs[3]);
  };
#pragma unroll 1
  for (int turn = 0; turn < 1 + kScales; ++turn) {
#pragma unroll 1
    for (int half = 0; half < kQueryStages; ++half) raw.template each_chunk<2>(half, convert);
    if (!kScales || turn == 1) break;
    const uint32_t largest = raw.largest(top);
    // From 2^-7 on, to below 2^15; the smallest step of fp16 is 2^-24.
    const bool fits = largest == 0 || (largest >= 120u << 7 && largest < 142u << 7);
    if (__all_sync(0xffffffffu, fits)) break;
    const QueryScale<14> scale(largest);
    if (!fits) factor = scale.factor, inverse = scale.inverse;
  }
  if (quad == 0) scales[row] = inverse;
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
