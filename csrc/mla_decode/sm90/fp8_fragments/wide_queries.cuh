#pragma once
#include "mla_decode/sm90/fp8_fragments/queries.cuh"
#include "mla_decode/sm90/fp8_fragments/wide_layout.h"
#include "mla_decode/sm90/raw_queries.cuh"

namespace attnops::mla_decode::sm90::fp8_fragments {

// The rows of a piece as queries.cuh stores them, by kQueryThreads, eight rows a warp. Rows that the piece does not
// have are zeros. What the scores of a row must be multiplied by goes to `scales`. `done` runs after each half.
template <typename T, class At, class Done>
__device__ inline void convert_queries(const uint8_t* first, const uint8_t* second, uint32_t queries, float* scales,
                                       const Done& done) {
  const int row = threadIdx.x / 4, quad = threadIdx.x % 4;
  const RawQueryRow raw(first, second, row);
  float factor = 1.f, inverse = 1.f;
  if constexpr (!std::is_same_v<T, __half>) {
    const QueryScale<14> scale(raw.largest());
    factor = scale.factor, inverse = scale.inverse;
  }
  const bool has_row = At::kRows == kPlanRows || row < At::kRows;
  if (quad == 0 && has_row) scales[row] = inverse;
#pragma unroll 1
  for (int half = 0; half < kQueryStages; ++half) {
    if (has_row) {
      raw.each_chunk<1>(half, [&](const QueryChunk& x, int piece, int upper) {
        const uint32_t place = queries + piece * At::kQueryPiece;
        if (At::kScaled && piece == kPieces - 1) {  // K's rope part is 16 bit, and in order
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
      });
    }
    done(half);
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
