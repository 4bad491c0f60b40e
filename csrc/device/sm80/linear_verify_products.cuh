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
                                              float (&sums)[kBlocks][4], float (&rest)[kBlocks][4],
                                              int first_column = 0) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(T)), kChunks = kTileKeys / (4 * kVec);
  constexpr bool kWide = sizeof(T) == 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float* own[kBlocks];  // sums of columns that are not there are not used
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
    own[b] = factors + min_of(first_column + 8 * b + g, columns - 1) * kTileStride + t * kVec;
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

// Of each row of a ring what the rows behind it decay by, behind the last one what all do. By one warp; a lane's first
// row has come before.
__device__ __forceinline__ void put_decays(const VerifyTileLayout& at, float* shared, const float* ring_decay,
                                           float first, int length) {
  const int lane = threadIdx.x % 32;
  float all = 1.f;
  for (int row = (length - 1) / 32 * 32; row >= 0 && length > 0; row -= 32) {
    float behind = 1.f;  // with its own
    if (row + lane < length) behind = row == 0 ? first : ring_decay[row + lane];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float more = __shfl_down_sync(0xffffffffu, behind, distance);
      if (lane + distance < 32) behind *= more;
    }
    const float next = __shfl_down_sync(0xffffffffu, behind, 1);
    if (row + lane < length) shared[at.decays() + row + lane] = lane < 31 ? next * all : all;
    all *= __shfl_sync(0xffffffffu, behind, 0);
  }
  if (lane == 0) shared[at.decays() + at.total_rows()] = all;
}

// The decay of the drafts behind `own` up to one, of those on its path.
template <int kDrafts>
__device__ __forceinline__ float path_decay(const float (&decays)[kDrafts], uint32_t path, int own, int draft) {
  float all = 1.f;
#pragma unroll
  for (int d = 0; d < kDrafts; ++d) all *= d > own && d <= draft && (path >> d & 1u) != 0 ? decays[d] : 1.f;
  return all;
}

template <int kDrafts>
__device__ __forceinline__ void load_decays(const VerifyTileLayout& at, const float* shared, float (&decays)[kDrafts]) {
#pragma unroll
  for (int d = 0; d < kDrafts; ++d) {
    decays[d] = d < at.drafts ? shared[at.decays() + at.rows_before + d] : 1.f;
  }
}

// Products of 16 rows' keys with a block of the drafts' keys and queries, under the decays between them. By one warp.
template <bool kDelta, int kDrafts>
__device__ __forceinline__ void multiply_keys(const LinearVerify& p, const VerifyTileLayout& at, float* shared,
                                              int request, int length, int tile, int block) {
  constexpr int kEach = kDelta ? 1 : 2;  // drafts of a lane
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, drafts = at.drafts;
  const int first = tile * kTileRows + g;
  const auto draft_of = [&](int n) { return kDelta ? 4 * block + t : 8 * block + 2 * t + n; };
  float decays[kDrafts], between[kEach][2];
  load_decays(at, shared, decays);
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int draft = draft_of(n);
    const uint32_t path = draft < drafts ? p.ancestors(request, draft) | 1u << draft : 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 8 * r, own = row - at.rows_before;
      const bool seen = draft < drafts && (row < length || (own >= 0 && own <= draft && (path >> own & 1u) != 0));
      const float behind = row < length ? shared[at.decays() + row] : 1.f;
      between[n][r] = seen ? behind * path_decay(decays, path, max_of(own, -1), draft) : -1.f;
    }
  }
  const float* keys = shared + at.row_keys() + first * kTileStride + 4 * t;
  float sums[1][4] = {}, rest[1][4] = {};
  multiply_tile<float, 1>([&](int r, int c) { return load_vec<RowVec<float, 4>>(keys + 8 * r * kTileStride + 16 * c); },
                          shared + at.factors(), at.columns, sums, rest, 8 * block);
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    if (draft_of(n) >= drafts) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float decay = between[n][r];
      float* to = shared + at.products() + (first + 8 * r) * at.product_stride() + 8 * block + 2 * t;
      if constexpr (kDelta) {
        *reinterpret_cast<float2*>(to) = decay < 0.f ? make_float2(0.f, 0.f)
                                                     : make_float2(decay * (sums[0][2 * r] + rest[0][2 * r]),
                                                                   decay * (sums[0][2 * r + 1] + rest[0][2 * r + 1]));
      } else {
        to[n] = decay < 0.f ? 0.f : decay * (sums[0][2 * r + n] + rest[0][2 * r + n]);
      }
    }
  }
}

}  // namespace attnops
