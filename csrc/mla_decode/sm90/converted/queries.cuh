#pragma once
#include <cuda_bf16.h>

#include "mla_decode/sm90/converted/layout.h"
#include "mla_decode/sm90/raw_queries.cuh"

namespace attnops::mla_decode::sm90::converted {

// The latent part of 64 query rows in shared memory from bf16 to fp16, in place, by both groups: four threads a row.
// Rows become fp16 as they are, if that loses nothing that their largest value would show. Any other is multiplied by a
// power of two. What that divides scores by goes to kQueryScales.
__device__ inline void convert_queries(uint8_t* base, uint32_t shared) {
  const int row = threadIdx.x / 4, quad = threadIdx.x % 4;
  uint4 x[16];
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    // Neighbouring rows begin at different halves of a tile, for the banks.
    const int chunk = 4 * ((i ^ row) & 1) + quad;
    x[i] = *reinterpret_cast<const uint4*>(base + kQ + i / 2 * kTileBytes + attnops::sm90::swizzled(row, chunk));
    RawQueryRow<>::follow({x[i].x, x[i].y, x[i].z, x[i].w}, top);
  }
  const uint32_t largest = RawQueryRow<>::largest(top);
  // From 2^-7 on, to below 2^15; the smallest step of fp16 is 2^-24.
  const bool as_it_is = largest == 0 || (largest >= 120u << 7 && largest < 142u << 7);
  const QueryScale<14> scale(largest);
  const float factor = as_it_is ? 1.f : scale.factor;
  if (quad == 0) reinterpret_cast<float*>(base + kQueryScales)[row] = as_it_is ? 1.f : scale.inverse;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int chunk = 4 * ((i ^ row) & 1) + quad;
    const auto convert = [&](uint32_t pair) {
      const float2 value = unpack_pair(pair, __nv_bfloat16{});
      return attnops::sm90::pack_pair<__half>(value.x * factor, value.y * factor);
    };
    *reinterpret_cast<uint4*>(base + kQ + i / 2 * kTileBytes + attnops::sm90::swizzled(row, chunk)) = {
        convert(x[i].x), convert(x[i].y), convert(x[i].z), convert(x[i].w)};
  }
  attnops::sm90::fence_async_proxy();
  attnops::sm90::mbarrier_meet(shared + kQueriesConverted);
}

// The rope part, which stays bf16, times the same power of two, as fragments. `scale`: of the thread's two rows.
__device__ inline void scale_rope_queries(const float (&scale)[2], uint32_t (&q_rope)[4][4]) {
  if (!__any_sync(0xffffffffu, scale[0] != 1.f || scale[1] != 1.f)) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = __fdividef(1.f, scale[h]);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
      for (int i = h; i < 4; i += 2) {
        const float2 value = unpack_pair(q_rope[kk][i], __nv_bfloat16{});
        q_rope[kk][i] = attnops::sm90::pack_pair<__nv_bfloat16>(value.x * factor, value.y * factor);
      }
    }
  }
}

}  // namespace attnops::mla_decode::sm90::converted
