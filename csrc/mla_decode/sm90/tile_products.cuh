#pragma once
#include <cstdint>

#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/layout.h"

// What the 16-bit and the converting FP8 kernel do alike with a tile's probabilities and a group's columns of V.
namespace attnops::mla_decode::sm90 {

// Rounds a tile's probabilities, keeps them as fragments, and writes fragment kk to `address(kk)` for the other group.
template <typename T, typename Address>
__device__ inline void write_probabilities(const float (&s)[32], uint32_t (&a)[4][4], const Address& address) {
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (2 * kk + i / 2) + 2 * (i % 2);
      a[kk][i] = attnops::sm90::pack_pair<T>(s[at], s[at + 1]);
    }
    attnops::sm90::store_fragment(a[kk], address(kk));
  }
}

// o += probabilities (fragments) times the columns of V that the descriptor names, in flight.
template <typename T>
__device__ inline void multiply_columns(const uint32_t (&a)[4][4], uint64_t value, float (&o)[128]) {
  attnops::sm90::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) attnops::sm90::wgmma_n256<T>(o, a[kk], value + kk * attnops::sm90::kStepMnMajor);
  attnops::sm90::wgmma_commit();
}

// The same with probabilities in shared memory.
template <typename T>
__device__ inline void multiply_columns(uint64_t probabilities, uint64_t value, float (&o)[128]) {
  attnops::sm90::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    attnops::sm90::wgmma_n256<T>(o, probabilities + kk * attnops::sm90::kStepKMajor,
                                 value + kk * attnops::sm90::kStepMnMajor);
  }
  attnops::sm90::wgmma_commit();
}

// Most tiles move no maximum, and 128 registers stay as they are.
__device__ inline void rescale(float (&o)[128], const float (&factor)[kRowsPerThread]) {
  if (!__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
}

}  // namespace attnops::mla_decode::sm90
