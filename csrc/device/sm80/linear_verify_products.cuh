#pragma once
#include "device/sm80/linear_verify_draft.cuh"
#include "device/sm80/mma.cuh"

// Products by matrix units, for linear_verify_tiles.cuh: of a state's rows and of keys, with what drafts bring.
namespace attnops {

// 16 rows of `T` with all columns. `rows(r, c)` is a lane's vector c of row g + 8 r. Of the sums a lane has (row g,
// column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each block: the large parts' here, what the small ones add
// apart.
template <typename T, int kBlocks, typename Rows>
__device__ __forceinline__ void multiply_tile(const Rows& rows, const float* factors, int columns,
                                              float (&sums)[kBlocks][4], float (&rest)[kBlocks][4]) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(T)), kChunks = kTileKeys / (4 * kVec);
  constexpr bool kWide = sizeof(T) == 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float* own[kBlocks];  // sums of columns that are not there are not used
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) own[b] = factors + min_of(8 * b + g, columns - 1) * kTileStride + t * kVec;
#pragma unroll(kBlocks == 1 ? 4 : 2)
  for (int c = 0; c < kChunks; ++c) {
    uint32_t upper[2][kVec], lower[2][kVec];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto vec = rows(r, c);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float x = vec.at(e);
        // Of what is left 11 bits of at most 13 are read.
        upper[r][e] = kWide ? __float_as_uint(x) & 0xffffe000u : __float_as_uint(x);
        lower[r][e] = kWide ? __float_as_uint(x - __uint_as_float(upper[r][e])) : 0u;
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float large[kVec], small[kVec];
      load_shared(large, own[b] + c * 4 * kVec);
      load_shared(small, own[b] + columns * kTileStride + c * 4 * kVec);
#pragma unroll
      for (int e = 0; e < kVec; e += 2) {
        const uint32_t high[4] = {upper[0][e], upper[1][e], upper[0][e + 1], upper[1][e + 1]};
        mma_m16n8k8_tf32(sums[b], high, __float_as_uint(large[e]), __float_as_uint(large[e + 1]));
        mma_m16n8k8_tf32(rest[b], high, __float_as_uint(small[e]), __float_as_uint(small[e + 1]));
        if constexpr (kWide) {
          const uint32_t low[4] = {lower[0][e], lower[1][e], lower[0][e + 1], lower[1][e + 1]};
          mma_m16n8k8_tf32(rest[b], low, __float_as_uint(large[e]), __float_as_uint(large[e + 1]));
        }
      }
    }
  }
}

// Products of rows' keys with the drafts' keys and queries, under the decays between them. By one warp for 16 rows.
template <bool kDelta, int kBlocks>
__device__ __forceinline__ void multiply_keys(const LinearVerify& p, const VerifyTileLayout& at, float* shared,
                                              int request, int length, int tile) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, drafts = at.drafts;
  const float* keys = shared + at.row_keys() + (tile * kTileRows + g) * kTileStride + 4 * t;
  float sums[kBlocks][4] = {}, rest[kBlocks][4] = {};
  multiply_tile<float, kBlocks>(
      [&](int r, int c) { return load_vec<RowVec<float, 4>>(keys + 8 * r * kTileStride + 16 * c); },
      shared + at.factors(), at.columns, sums, rest);
  const float* decays = shared + at.decays();
  float behind[2] = {1.f, 1.f};  // the ring's rows behind one's own
  const int first = tile * kTileRows + g;
  for (int i = length - 1; i > first; --i) {
    behind[0] *= decays[i];
    if (i > first + 8) behind[1] *= decays[i];
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (kDelta && n == 1) break;  // a lane's two columns are one draft's
      const int draft = kDelta ? 4 * b + t : 8 * b + 2 * t + n;
      if (draft >= drafts) continue;
      const uint32_t path = p.ancestors(request, draft) | 1u << draft;
      float after[2] = {1.f, 1.f};  // the path's drafts behind one's own row
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int own = first + 8 * r - at.rows_before;
        for (int d = draft; d >= 0 && d > own; --d) after[r] *= path >> d & 1u ? decays[at.rows_before + d] : 1.f;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first + 8 * r, own = row - at.rows_before;
        const bool seen = row < length || (own >= 0 && own <= draft && (path >> own & 1u) != 0);
        const float decay = own >= 0 ? after[r] : after[r] * behind[r];
        float* to = shared + at.products() + row * at.product_stride() + 8 * b + 2 * t;
        if constexpr (kDelta) {
          *reinterpret_cast<float2*>(to) = seen ? make_float2(decay * (sums[b][2 * r] + rest[b][2 * r]),
                                                              decay * (sums[b][2 * r + 1] + rest[b][2 * r + 1]))
                                                : make_float2(0.f, 0.f);
        } else {
          to[n] = seen ? decay * (sums[b][2 * r + n] + rest[b][2 * r + n]) : 0.f;
        }
      }
    }
  }
}

}  // namespace attnops
