#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm80/fp8_rows.cuh"
#include "device/sm90/wgmma.cuh"
#include "fmha/cuda/places.cuh"
#include "fmha/cuda/traits.h"

namespace attnops::fmha {

using attnops::sm90::swizzled;

// How rows are copied.
enum class Copy : int {
  kPieces,     // 16 bytes at a time, asynchronously
  kRawPieces,  // eight FP8 elements at a time, asynchronously, then converted
  kElements,   // rows that start anywhere, element by element
};

// What a launch of these kernels knows besides Schedule.
struct Rows {
  Copy queries, keys, out;
  int k_stages;  // 1 or 2, as shared memory has room
  Strides k, v;
};

// Eight elements from anywhere.
template <typename Element>
__device__ __forceinline__ auto gather(const void* source) {
  std::conditional_t<sizeof(Element) == 2, uint4, uint2> piece;
#pragma unroll
  for (int i = 0; i < 8; ++i) reinterpret_cast<Element*>(&piece)[i] = static_cast<const Element*>(source)[i];
  return piece;
}

// Brings the queries, keys and values of a work. All threads of the CTA take part, each for column tid % 8 of every
// chunk and every (kThreads / 8)th row.
template <class Tr, bool kInRow>
class Loader : public Places<Tr::kKeys, kInRow> {
 public:
  using Layout = SharedLayout<Tr>;
  using T = typename Tr::T;

  __device__ __forceinline__ Loader(const Params& p, const Schedule& s, const Rows& rows, const Work& w, char* base)
      : Places<Tr::kKeys, kInRow>(p, s, rows.k, rows.v, w, base + Layout::kPlaces),
        p_(p),
        s_(s),
        rows_(rows),
        w_(w),
        base_(base) {}

  __device__ __forceinline__ void bring_queries() const {
    for (int row = tid_ / 8; row < Tr::kRows; row += Tr::kThreads / 8) {
      const auto [token, head, exists] = sm90::place_of_row(s_, w_, row);
      const int64_t at = (static_cast<int64_t>(w_.first_q_token) + w_.first_token + token) * p_.q_stride_token +
                         head * p_.q_stride_head;
      const T* source = static_cast<const T*>(p_.q) + at;
#pragma unroll
      for (int c = 0; c < Tr::kQkChunks; ++c) {
        const int column = 64 * c + tid_ % 8 * 8;
        const bool take = exists && column < p_.head_dim_qk;
        char* to = base_ + Layout::kQ + c * Tr::kRows * 128 + swizzled(row, tid_ % 8);
        if (rows_.queries == Copy::kPieces) {
          cp_async_16(smem_address(to), take ? source + column : p_.q, take);
        } else {
          *reinterpret_cast<uint4*>(to) = take ? gather<uint16_t>(source + column) : uint4{};
        }
      }
    }
  }

  __device__ __forceinline__ void bring_keys(int tile, int stage) const {
    bring<Tr::kQkChunks, Tr::kHeadDimQk>(tile, &Place::k, p_.k, p_.head_dim_qk, rows_.k.token,
                                         base_ + Layout::kK + stage * Tr::kKBytes,
                                         base_ + Layout::raw_k(rows_.k_stages));
  }
  __device__ __forceinline__ void bring_values(int tile) const {
    bring<Tr::kVChunks, Tr::kHeadDimV>(tile, &Place::v, p_.v, p_.head_dim_v, rows_.v.token, base_ + Layout::kV,
                                       base_ + Layout::raw_v(rows_.k_stages));
  }

  // From FP8, what this thread itself has copied, when it has landed.
  __device__ __forceinline__ void convert_keys(int stage) const {
    if (rows_.keys == Copy::kRawPieces) {
      convert<Tr::kQkChunks, Tr::kHeadDimQk>(base_ + Layout::kK + stage * Tr::kKBytes,
                                             base_ + Layout::raw_k(rows_.k_stages));
    }
  }
  __device__ __forceinline__ void convert_values() const {
    if (rows_.keys == Copy::kRawPieces) {
      convert<Tr::kVChunks, Tr::kHeadDimV>(base_ + Layout::kV, base_ + Layout::raw_v(rows_.k_stages));
    }
  }

 private:
  // Calls visit(i, row, c) for each piece of this thread, in its i-th row; those behind the tile's head dim are never
  // read.
  static constexpr int kStep = Tr::kThreads / 8, kOwnRows = ceil_div(Tr::kKeys, kStep);
  static_assert(kStep % 8 == 0, "rows of a thread have one swizzle");
  template <int kChunks, int kHeadDim, class Visit>
  __device__ __forceinline__ void for_each_piece(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = tid_ / 8 + i * kStep;
      if (Tr::kKeys % kStep != 0 && row >= Tr::kKeys) break;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if ((c + 1) * 64 > kHeadDim && c * 64 + tid_ % 8 * 8 >= kHeadDim) continue;
        visit(i, row, c);
      }
    }
  }

  template <int kChunks, int kHeadDim>
  __device__ __forceinline__ void bring(int tile, int64_t Place::*member, const void* pool, int head_dim,
                                        int64_t stride, char* destination, char* raw) const {
    const Place* of_tile = this->of_tile(tile);
    const char* source = static_cast<const char*>(pool);
    const int column = tid_ % 8;
    if constexpr (kInRow) {
      bring_in_row<kChunks, kHeadDim>(tile, of_tile->*member, source, head_dim, stride, destination, raw);
      return;
    }
    int64_t at[kOwnRows];
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = tid_ / 8 + i * kStep;
      at[i] = of_tile[Tr::kKeys % kStep == 0 ? row : min_of(row, Tr::kKeys - 1)].*member;
    }
    if (rows_.keys == Copy::kPieces) {
      const uint32_t to = smem_address(destination);
      const char* from = source + column * 16;
      for_each_piece<kChunks, kHeadDim>([&](int i, int row, int c) {
        cp_async_16(to + c * Tr::kKeys * 128 + swizzled(row, column), from + (at[i] & INT64_MAX) + c * 128,
                    at[i] >= 0 && c * 64 + column * 8 < head_dim);
      });
    } else if (rows_.keys == Copy::kRawPieces) {
      const uint32_t to = smem_address(raw);
      const char* from = source + column * 8;
      for_each_piece<kChunks, kHeadDim>([&](int i, int row, int c) {
        cp_async_8(to + ((row * kChunks + c) * 8 + column) * 8, from + (at[i] & INT64_MAX) + c * 64,
                   at[i] >= 0 && c * 64 + column * 8 < head_dim);
      });
    } else {
#pragma unroll 1
      for (int i = tid_; i < Tr::kKeys * kChunks * 8; i += Tr::kThreads) {
        const int row = i / (kChunks * 8), piece = i % (kChunks * 8);
        const int64_t at = of_tile[row].*member;
        uint4 values{};
        if (at >= 0 && piece * 8 < head_dim) {
          values = size_of(p_.kv_dtype) == 2
                       ? gather<uint16_t>(source + at + piece * 16)
                       : widen<T>(p_.kv_dtype == DType::kFloat8E5M2, gather<uint8_t>(source + at + piece * 8));
        }
        *reinterpret_cast<uint4*>(destination + piece / 8 * Tr::kKeys * 128 + swizzled(row, piece % 8)) = values;
      }
    }
  }

  // A tile whose first row begins `begin` bytes into the pool. Instructions count here: all warps run them in each step
  // of the main loop, beside some 250 of the matrix units.
  template <int kChunks, int kHeadDim>
  __device__ __forceinline__ void bring_in_row(int tile, int64_t begin, const char* pool, int head_dim, int64_t stride,
                                               char* destination, char* raw) const {
    const int row = tid_ / 8, column = tid_ % 8;
    const int key = w_.place_of(tile) * Tr::kKeys + row - w_.key_begin;  // of the keys that the work sees
    const unsigned keys = begin < 0 ? 0 : w_.key_end - w_.key_begin;
    const char* from = pool + (begin & INT64_MAX) + row * stride;
    const int64_t step = kStep * stride;
    if (rows_.keys == Copy::kPieces) {
      const uint32_t to = smem_address(destination) + swizzled(row, column);
      from += column * 16;
      for_each_piece<kChunks, kHeadDim>([&](int i, int, int c) {
        const unsigned limit = c * 64 + column * 8 < head_dim ? keys : 0;
        cp_async_16(to + c * Tr::kKeys * 128 + i * kStep * 128, from + i * step + c * 128,
                    static_cast<unsigned>(key + i * kStep) < limit);
      });
    } else {
      const uint32_t to = smem_address(raw) + (row * kChunks * 8 + column) * 8;
      from += column * 8;
      for_each_piece<kChunks, kHeadDim>([&](int i, int, int c) {
        const unsigned limit = c * 64 + column * 8 < head_dim ? keys : 0;
        cp_async_8(to + i * kStep * kChunks * 64 + c * 64, from + i * step + c * 64,
                   static_cast<unsigned>(key + i * kStep) < limit);
      });
    }
  }

  template <int kChunks, int kHeadDim>
  __device__ __forceinline__ void convert(char* destination, const char* raw) const {
    for_each_piece<kChunks, kHeadDim>([&](int, int row, int c) {
      const uint2 bytes = *reinterpret_cast<const uint2*>(raw + ((row * kChunks + c) * 8 + tid_ % 8) * 8);
      *reinterpret_cast<uint4*>(destination + c * Tr::kKeys * 128 + swizzled(row, tid_ % 8)) =
          widen<T>(p_.kv_dtype == DType::kFloat8E5M2, bytes);
    });
  }

  const Params& p_;
  const Schedule& s_;
  const Rows& rows_;
  const Work& w_;
  char* base_;
  int tid_ = static_cast<int>(threadIdx.x);
};

}  // namespace attnops::fmha
