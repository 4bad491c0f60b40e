#pragma once
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/raw_queries.cuh"

// Queries to e4m3: every row is scaled by a power of two, so that its largest value lies in [128, 256).
namespace attnops::mla_decode::sm90::fp8_products {

__device__ inline void store_shared(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// The rows of a piece, by all consumers, eight of each warp; times `sign`. Rows that the piece does not have are zeros.
// What the scores of a row must be multiplied by goes to `scales`. `done` runs after each half. This code runs once a
// piece, and finds the instruction cache cold: it is kept short.
template <class Done>
__device__ inline void convert_queries(const uint8_t* first, const uint8_t* second, float sign, uint32_t queries,
                                       float* scales, const Done& done) {
  const int row = threadIdx.x / 4, quad = threadIdx.x % 4;
  const RawQueryRow raw(first, second, row, quad);
  const QueryScale<7> scale(raw.largest());
  const float factor = sign * scale.factor;
  if (quad == 0) scales[row] = scale.inverse;
#pragma unroll 1
  for (int half = 0; half < kQueryStages; ++half) {
    raw.each_chunk<1>(half, [&](const QueryChunk& x, int piece, int upper) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 value = unpack_pair(x.pair[i], __nv_bfloat16{});
        pairs[i] = attnops::sm90::pack_e4m3(value.x * factor, value.y * factor);
      }
      const int chunk = 2 * upper + quad / 2;  // of 16 bytes of the piece
      const int place = piece < kHeadDimV / 64
                            ? piece / 2 * kTileBytes + attnops::sm90::swizzled(row, piece % 2 * 4 + chunk)
                            : kRope + swizzled_half(row, chunk);
      store_shared(queries + place + quad % 2 * 8, pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    });
    done(half);
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_products
