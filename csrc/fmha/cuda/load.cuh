#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm80/fp8_rows.cuh"
#include "device/sm80/shared_pieces.cuh"
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

// Strides in pieces of 16 bytes, of pools below 2^32 of them.
struct Units {
  uint32_t page, token, head;
};

// What a launch of these kernels knows besides Schedule.
struct Rows {
  Copy queries, keys, out;
  // Of the pools; ragged keys are the first page of one, which begins at 0.
  int page_size;
  unsigned pages;
  Strides k, v;
  Units k_units, v_units;
};

// Eight elements from anywhere.
template <typename Element>
__device__ __forceinline__ auto gather(const void* source) {
  std::conditional_t<sizeof(Element) == 2, uint4, uint2> piece;
#pragma unroll
  for (int i = 0; i < 8; ++i) reinterpret_cast<Element*>(&piece)[i] = static_cast<const Element*>(source)[i];
  return piece;
}

// Brings keys and values of a work. All threads of the CTA take part, each for column tid % 8 of every chunk and every
// (kThreads / 8)th row.
template <class Tr, Source kSource>
class Loader : public Places<Tr::kKeys> {
 public:
  using Layout = SharedLayout<Tr>;
  using T = typename Tr::T;
  static constexpr int kStep = Tr::kThreads / 8, kOwnRows = ceil_div(Tr::kKeys, kStep);
  static_assert(kStep % 8 == 0, "rows of a thread have one swizzle");

  __device__ __forceinline__ Loader(const Params& p, const Schedule& s, const Rows& rows, const Work& w, char* base)
      : Places<Tr::kKeys>(p, s, rows.k, rows.v, w, base + Layout::kPlaces),
        p_(p),
        s_(s),
        rows_(rows),
        w_(w),
        base_(base) {}

  // Before the first copies, which wait for a barrier where rows are not in a row.
  __device__ __forceinline__ void begin(int tile) {
    if constexpr (kSource == Source::kInRow) {
      if (!p_.paged) return;
      table_ = p_.page_table.row(w_.request);
      ahead_ = page_of(tile);
      advance(tile);
    } else {
      this->place(tile, this->look_up(tile));
      this->place(tile + 1, this->look_up(tile + 1));
      __syncthreads();
    }
  }

  // Copies are of this tile from now on. Tiles follow each other. The page of the next one is on its way then.
  __device__ __forceinline__ void advance(int tile) {
    if (kSource != Source::kInRow || !p_.paged) return;
    page_ = ahead_;
    ahead_ = page_of(tile + 1);
    if (p_.report != nullptr && threadIdx.x == 0 && tile < w_.tile_end) {
      const int key = max_of(w_.place_of(tile) * Tr::kKeys, w_.key_begin);
      if (key < w_.key_end && !p_.page_table.has_page(page_)) {
        report_page(p_, w_, key, s_.page_size.divide(key), page_);
      }
    }
  }

  // Of a tile that begins with key `first`, and that `advance` has named where rows are in a row. Without `go` nothing
  // happens, by predicates: the compiler may mix these copies with products, which a branch would end.
  __device__ __forceinline__ void bring_keys(int tile, int first, int stage, bool go) const {
    bring<Tr::kQkChunks, Tr::kHeadDimQk>(in_row(first), tile, &Place::k, p_.k, rows_.k_units, p_.head_dim_qk,
                                         smem_address(base_ + Layout::kK) + stage * Layout::kStageBytes,
                                         smem_address(base_ + Layout::kRawK), go);
  }
  __device__ __forceinline__ void bring_values(int tile, int first, int stage, bool go) const {
    bring<Tr::kVChunks, Tr::kHeadDimV>(in_row(first), tile, &Place::v, p_.v, rows_.v_units, p_.head_dim_v,
                                       smem_address(base_ + Layout::kV) + stage * Layout::kStageBytes,
                                       smem_address(base_ + Layout::kRawV), go);
  }
  // Both.
  __device__ __forceinline__ void bring_tile(int tile, int first, int stage, bool go) const {
    const InRow at = in_row(first);
    bring<Tr::kQkChunks, Tr::kHeadDimQk>(at, tile, &Place::k, p_.k, rows_.k_units, p_.head_dim_qk,
                                         smem_address(base_ + Layout::kK) + stage * Layout::kStageBytes, 0, go);
    bring<Tr::kVChunks, Tr::kHeadDimV>(at, tile, &Place::v, p_.v, rows_.v_units, p_.head_dim_v,
                                       smem_address(base_ + Layout::kV) + stage * Layout::kStageBytes, 0, go);
  }

  __device__ __forceinline__ bool is_raw() const { return rows_.keys == Copy::kRawPieces; }

  // From FP8, what this thread itself has copied, when it has landed.
  __device__ __forceinline__ void convert_keys() const {
    if (kSource == Source::kAny && rows_.keys == Copy::kRawPieces) {
      convert<Tr::kQkChunks, Tr::kHeadDimQk>(base_ + Layout::kK, base_ + Layout::kRawK);
    }
  }
  __device__ __forceinline__ void convert_values() const {
    if (kSource == Source::kAny && rows_.keys == Copy::kRawPieces) {
      convert<Tr::kVChunks, Tr::kHeadDimV>(base_ + Layout::kV, base_ + Layout::kRawV);
    }
  }

 private:
  // The page of a tile in a row; below 0: nobody sees the tile.
  __device__ __forceinline__ int page_of(int tile) const {
    const int key = max_of(w_.place_of(tile) * Tr::kKeys, w_.key_begin);
    return tile < w_.tile_end && key < w_.key_end ? table_[s_.page_size.divide(key)] : -1;
  }

  // Calls visit(i, row, c) for each piece of this thread, in its i-th row; those behind the tile's head dim are never
  // read.
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

  // kInRow: this thread's first row of the tile that begins with key `first`.
  struct InRow {
    int token;           // in the page, or in ragged keys
    unsigned key, keys;  // of how many keys of the work; none where the pool has no such page
    int head;
  };
  __device__ __forceinline__ InRow in_row(int first) const {
    if constexpr (kSource != Source::kInRow) return {};
    const int row = tid_ / 8;
    const bool is_page = static_cast<unsigned>(page_) < rows_.pages;
    return {w_.first_k_token + first - s_.page_size.divide(first) * rows_.page_size + row,
            static_cast<unsigned>(first + row - w_.key_begin), is_page ? w_.key_end - w_.key_begin : 0u, w_.kv_head};
  }

  template <int kChunks, int kHeadDim>
  __device__ __forceinline__ void bring(const InRow& at, int tile, int64_t Place::*member, const void* pool,
                                        const Units& units, int head_dim, uint32_t to, uint32_t raw, bool go) const {
    const int row = tid_ / 8, column = tid_ % 8;
    const char* const source = static_cast<const char*>(pool);
    if constexpr (kSource == Source::kInRow) {
      const uint32_t piece = page_ * units.page + at.token * units.token + at.head * units.head + column;
      copy<kChunks, kHeadDim>(to, head_dim, go, [&](int i) {
        return RowOfPool{source + uint64_t{piece + i * kStep * units.token} * 16, at.key + i * kStep < at.keys};
      });
    } else if constexpr (kSource == Source::kGathered) {
      const Place* const places = this->of_tile(tile);
      int64_t byte[kOwnRows];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        byte[i] = places[Tr::kKeys % kStep == 0 ? row + i * kStep : min_of(row + i * kStep, Tr::kKeys - 1)].*member;
      }
      copy<kChunks, kHeadDim>(to, head_dim, go, [&](int i) {
        return RowOfPool{source + column * 16 + (byte[i] & INT64_MAX), byte[i] >= 0};
      });
    } else if (go) {
      bring_any<kChunks, kHeadDim>(tile, member, source, head_dim, to, raw);
    }
  }

  struct RowOfPool {
    const char* from;  // of this thread's column
    bool exists;
  };

  template <int kChunks, int kHeadDim, class RowAt>
  __device__ __forceinline__ void copy(uint32_t to, int head_dim, bool go, const RowAt& row_at) const {
    const uint32_t own = to + swizzled(tid_ / 8, tid_ % 8);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const RowOfPool row = row_at(i);
      const bool is_row = (i + 1) * kStep <= Tr::kKeys || tid_ / 8 + i * kStep < Tr::kKeys;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int column = c * 64 + tid_ % 8 * 8;
        const bool is_read = (c + 1) * 64 <= kHeadDim || column < kHeadDim;
        cp_async_16_if(go && is_row && is_read, own + c * Tr::kKeys * 128 + i * kStep * 128, row.from + c * 128,
                       row.exists && column < head_dim);
      }
    }
  }

  template <int kChunks, int kHeadDim>
  __device__ __forceinline__ void bring_any(int tile, int64_t Place::*member, const char* source, int head_dim,
                                            uint32_t to, uint32_t raw) const {
    const Place* of_tile = this->of_tile(tile);
    const int column = tid_ % 8;
    if (rows_.keys == Copy::kRawPieces) {
      int64_t at[kOwnRows];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        const int row = tid_ / 8 + i * kStep;
        at[i] = of_tile[Tr::kKeys % kStep == 0 ? row : min_of(row, Tr::kKeys - 1)].*member;
      }
      const char* from = source + column * 8;
      for_each_piece<kChunks, kHeadDim>([&](int i, int row, int c) {
        cp_async_8(raw + raw_piece(row, c, column), from + (at[i] & INT64_MAX) + c * 64,
                   at[i] >= 0 && c * 64 + column * 8 < head_dim);
      });
      return;
    }
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
      store_shared(to + piece / 8 * Tr::kKeys * 128 + swizzled(row, piece % 8), values);
    }
  }

  // Byte of an FP8 piece. Rows of a chunk follow each other, so that sixteen lanes have all banks.
  __device__ __forceinline__ static int raw_piece(int row, int c, int column) {
    return ((c * Tr::kKeys + row) * 8 + column) * 8;
  }

  // All pieces are read before the first is stored: the compiler would not read one past a store that may change it.
  template <int kChunks, int kHeadDim>
  __device__ __forceinline__ void convert(char* destination, const char* raw) const {
    uint2 bytes[kOwnRows][kChunks];
    for_each_piece<kChunks, kHeadDim>([&](int i, int row, int c) {
      bytes[i][c] = *reinterpret_cast<const uint2*>(raw + raw_piece(row, c, tid_ % 8));
    });
    const auto store = [&](auto is_e5m2) {
      for_each_piece<kChunks, kHeadDim>([&](int i, int row, int c) {
        *reinterpret_cast<uint4*>(destination + c * Tr::kKeys * 128 + swizzled(row, tid_ % 8)) =
            widen<T>(is_e5m2.value, bytes[i][c]);
      });
    };
    if (p_.kv_dtype == DType::kFloat8E5M2) {
      store(std::true_type{});
    } else {
      store(std::false_type{});
    }
  }

  const Params& p_;
  const Schedule& s_;
  const Rows& rows_;
  const Work& w_;
  char* base_;
  int tid_ = static_cast<int>(threadIdx.x);
  const int32_t* table_;      // kInRow: pages of the request,
  int page_ = 0, ahead_ = 0;  // that of the tile that is copied, and of the one behind it
};

}  // namespace attnops::fmha
