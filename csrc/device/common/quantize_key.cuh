#pragma once
#include <cuda_fp8.h>

#include "core/index_key.h"

namespace attnops {

// A warp quantizes a row of kDim values, kDim / 32 neighbours a lane, by the sums of cpu/quantize_key.h in their order.
// Returns the scale. All lanes must call it.
template <int kDim>
__device__ float quantize_key(const Quantization& how, float (&x)[kDim / 32], uint8_t* out) {
  constexpr int kPer = kDim / 32;
  const int lane = threadIdx.x % 32;
  if (how.hadamard) {
#pragma unroll
    for (int half = 1; half < kPer; half *= 2) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (i & half) continue;
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
#pragma unroll
    for (int half = 1; half < 32; half *= 2) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const float other = __shfl_xor_sync(~0u, x[i], half);
        x[i] = lane & half ? other - x[i] : x[i] + other;
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] *= hadamard_factor(kDim);
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) largest = max_of(largest, bits_of(x[i]) & 0x7FFFFFFFu);
  const float scale = key_scale(__reduce_max_sync(~0u, largest), how.ue8m0);
  // Pairs: a row is on a 4-byte boundary in pages, and wherever it may be in an output.
  uint8_t bytes[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) bytes[i] = __nv_cvt_float_to_fp8(x[i] / scale, __NV_SATFINITE, __NV_E4M3);
  uint8_t* const mine = out + lane * kPer;
  if (reinterpret_cast<uintptr_t>(out) % kPer == 0) {
    if constexpr (kPer == 4) {
      *reinterpret_cast<uchar4*>(mine) = make_uchar4(bytes[0], bytes[1], bytes[2], bytes[3]);
    } else {
      *reinterpret_cast<uchar2*>(mine) = make_uchar2(bytes[0], bytes[1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i) mine[i] = bytes[i];
  }
  return scale;
}

}  // namespace attnops
