#pragma once
#include "core/math.h"
#include "device/sm90/wgmma.cuh"
#include "fmha/sm90/work.cuh"

namespace attnops::fmha::sm90 {

namespace hopper = attnops::sm90;

// bfloat16 queries become fp16 in their place, by a warpgroup. Four lanes have a row, and scale it by the power of two
// that brings its largest value below 2^16: all values above 2^-30 of that one stay exact. Scores are multiplied by the
// inverse. A fence and a barrier must follow.
template <class Tr>
__device__ __forceinline__ void convert_queries(uint32_t queries, int own_row, int lane, float (&inverses)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = own_row + 8 * h;
    uint32_t values[Tr::kQkChunks * 2][4], largest = 0;
    const auto at = [&](int i) {
      return queries + i / 2 * Tr::kRows * 128 + hopper::swizzled(row, lane % 4 * 2 + i % 2);
    };
#pragma unroll
    for (int i = 0; i < Tr::kQkChunks * 2; ++i) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(values[i][0]), "=r"(values[i][1]), "=r"(values[i][2]), "=r"(values[i][3])
                   : "r"(at(i))
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < Tr::kQkChunks * 8; ++i) largest = __vmaxu2(largest, values[i / 4][i % 4] & 0x7fff7fffu);
    largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int exponent = static_cast<int>(max_of(largest >> 16, largest & 0xffffu) >> 7);  // biased by 127
    const int power = min_of(127 + 15 + 127 - exponent, 227);                              // likewise
    const float scale = __int_as_float(power << 23), inverse = __int_as_float((254 - power) << 23);
#pragma unroll
    for (int i = 0; i < Tr::kQkChunks * 2; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = hopper::pack_pair<typename Tr::T>(__uint_as_float(values[i][j] << 16) * scale,
                                                     __uint_as_float(values[i][j] & 0xffff0000u) * scale);
      }
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at(i)), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
                   "r"(pairs[3])
                   : "memory");
    }
    inverses[h] = inverse;
  }
}

}  // namespace attnops::fmha::sm90
