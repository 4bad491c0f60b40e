#pragma once
#include "device/sm90/wgmma.cuh"
#include "fmha/sm90/partial.cuh"
#include "fmha/sm90/work.cuh"

// How a lane's two rows of results leave its registers.
namespace attnops::fmha::sm90 {

namespace hopper = attnops::sm90;

// Four lanes hold a row, two neighbours of eight columns each. They trade, so that each stores sixteen bytes: of 32
// columns lane i gets the i-th eight.
template <class Tr>
__device__ __forceinline__ void store_rows(const Params& p, typename Tr::Out* const (&rows)[2],
                                           const float (&factor)[2], int lane, const float (&out)[Tr::kHeadDimV / 2]) {
  static_assert(Tr::kHeadDimV % 32 == 0);
  const int quarter = lane % 4;
  const bool odd = quarter & 1, upper = quarter & 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!__any_sync(0xffffffffu, rows[h] != nullptr)) continue;  // a short call's: each instruction costs
#pragma unroll
    for (int columns = 0; columns < Tr::kHeadDimV; columns += 32) {
      uint32_t own[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* o = out + columns / 2 + 4 * i + 2 * h;
        // Selected, not multiplied: without a key the accumulators hold anything.
        own[i] = factor[h] == 0.f ? 0u : hopper::pack_pair<typename Tr::Out>(o[0] * factor[h], o[1] * factor[h]);
      }
      // A transpose of four by four: first in blocks of two, then inside.
      const uint32_t a = __shfl_xor_sync(0xffffffffu, upper ? own[0] : own[2], 2),
                     b = __shfl_xor_sync(0xffffffffu, upper ? own[1] : own[3], 2);
      uint32_t left[2] = {upper ? a : own[0], upper ? b : own[1]};   // columns of lanes 0 and 1
      uint32_t right[2] = {upper ? own[2] : a, upper ? own[3] : b};  // of lanes 2 and 3
      const uint32_t c = __shfl_xor_sync(0xffffffffu, odd ? left[0] : left[1], 1),
                     d = __shfl_xor_sync(0xffffffffu, odd ? right[0] : right[1], 1);
      const uint4 piece{odd ? c : left[0], odd ? left[1] : c, odd ? d : right[0], odd ? right[1] : d};
      const int column = columns + 8 * quarter;
      if (rows[h] != nullptr && column < p.head_dim_v) *reinterpret_cast<uint4*>(rows[h] + column) = piece;
    }
  }
}

}  // namespace attnops::fmha::sm90
