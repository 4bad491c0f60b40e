#pragma once
#include "device/sm80/cp_async.cuh"
#include "fmha/cuda/load.cuh"

namespace attnops::fmha {

// The rows of a warp in q, out and lse: nobody else reads or writes them. Lane i looks up row i, once; who copies
// pieces of a row asks that lane. Eight lanes have a chunk of a row, so a pass is four rows.
template <class Tr>
class OwnRows {
 public:
  using T = typename Tr::T;

  __device__ __forceinline__ OwnRows(const Params& p, const Schedule& s, const Work& w, int warp_row)
      : lane_(threadIdx.x % 32), warp_row_(warp_row) {
    const auto [token, head, exists] = sm90::place_of_row(s, w, warp_row + lane_ % Tr::kWarpRows);
    token_ = exists ? int64_t{w.first_q_token} + w.first_token + token : -1;
    head_ = exists ? head : -1;
  }

  // Of the warp's row `row`, which need not be this lane's; -1: there is none.
  __device__ __forceinline__ int head_of(int row) const { return __shfl_sync(~0u, head_, row); }

  __device__ __forceinline__ void bring_queries(const Params& p, char* tile, bool in_pieces) const {
    const T* q = static_cast<const T*>(p.q);
    const int64_t own = token_ < 0 ? -1 : token_ * p.q_stride_token + head_ * p.q_stride_head;
    const uint32_t to = smem_address(tile) + place_of_piece();
    if (in_pieces) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int64_t at = of_pass(own, i);
#pragma unroll
        for (int c = 0; c < Tr::kQkChunks; ++c) {
          const int column = 64 * c + lane_ % 8 * 8;
          cp_async_16(place_of(to, i, c), q + (at & INT64_MAX) + column, at >= 0 && column < p.head_dim_qk);
        }
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kPasses * Tr::kQkChunks; ++i) {
      const int pass = i / Tr::kQkChunks, c = i % Tr::kQkChunks, column = 64 * c + lane_ % 8 * 8;
      const int64_t at = of_pass(own, pass);
      const bool take = at >= 0 && column < p.head_dim_qk;
      store_shared(place_of(to, pass, c), take ? gather<uint16_t>(q + at + column) : uint4{});
    }
  }

  // Rows that the warp has written to `tile`, in the layout of queries.
  __device__ __forceinline__ void store(const Params& p, const char* tile, bool in_pieces) const {
    T* out = static_cast<T*>(p.out);
    const int64_t own = token_ < 0 ? -1 : token_ * p.out_stride_token + head_ * p.out_stride_head;
    const uint32_t from = smem_address(tile) + place_of_piece();
    if (in_pieces) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int64_t at = of_pass(own, i);
#pragma unroll
        for (int c = 0; c < Tr::kVChunks; ++c) {
          const int column = 64 * c + lane_ % 8 * 8;
          const uint4 piece = load_shared_piece(place_of(from, i, c));
          if (at >= 0 && column < p.head_dim_v) *reinterpret_cast<uint4*>(out + at + column) = piece;
        }
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kPasses * Tr::kVChunks; ++i) {
      const int pass = i / Tr::kVChunks, c = i % Tr::kVChunks, column = 64 * c + lane_ % 8 * 8;
      const int64_t at = of_pass(own, pass);
      const uint4 piece = load_shared_piece(place_of(from, pass, c));
      if (at < 0 || column >= p.head_dim_v) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) out[at + column + e] = reinterpret_cast<const T*>(&piece)[e];
    }
  }

  // `lses`: of this lane's rows, (lane / 4) + 8 h of block b.
  __device__ __forceinline__ void store_lse(const Params& p, const float (&lses)[Tr::kBlocks][2]) const {
    if (p.lse == nullptr) return;
    float own = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * Tr::kBlocks; ++i) {
      const float lse = __shfl_sync(~0u, lses[i / 2][i % 2], lane_ % 8 * 4);
      if (lane_ / 8 == i) own = lse;
    }
    if (token_ >= 0 && lane_ < Tr::kWarpRows) p.lse[token_ * p.num_q_heads + head_] = own;
  }

 private:
  static constexpr int kPasses = Tr::kWarpRows / 4;

  // Of the first pass; an odd pass has the other swizzle of the two that rows four apart have.
  __device__ __forceinline__ int place_of_piece() const { return warp_row_ * 128 + swizzled(lane_ / 8, lane_ % 8); }
  __device__ __forceinline__ static uint32_t place_of(uint32_t first, int pass, int chunk) {
    return (first ^ (pass % 2 << 6)) + chunk * Tr::kRows * 128 + pass * 4 * 128;
  }
  __device__ __forceinline__ int64_t of_pass(int64_t own, int i) const {
    return __shfl_sync(~0u, own, 4 * i + lane_ / 8);
  }

  int lane_, warp_row_;
  int64_t token_;  // of q
  int head_;
};

}  // namespace attnops::fmha
