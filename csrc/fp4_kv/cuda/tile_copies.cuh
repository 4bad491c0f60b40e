#pragma once
#include "device/sm80/cp_async.cuh"
#include "fp4_kv/shapes.h"
#include "scheduler/split_kv.h"

// How tiles of K and V of four bits come into shared memory: as they lie in pages, for a warp alone, two ahead.
namespace attnops::fp4_kv {

inline constexpr int kStages = 3;

// A tile of one side in shared memory: rows of codes, rows of scales. Of values, see `value_chunk`.
template <int kDim>
struct SideTile {
  static constexpr int kRowBytes = kDim / 2, kScaleBytes = kDim / 16;
  static constexpr int kScalesAt = kTileKeys * kRowBytes, kBytes = kScalesAt + kTileKeys * kScaleBytes;
  static_assert(kBytes % 128 == 0);
};

// Keys of kStages tiles, then their values.
template <int kDim>
inline constexpr int kWarpBytes = SideTile<kDim>::kBytes * 2 * kStages;

// A warp's keys and values of a share. kInPages: `tiles_in_pages` and scales on boundaries, so that a tile has one
// address. Else each key has its own.
template <int kDim, bool kInPages>
class TileCopies {
 protected:
  using Tile = SideTile<kDim>;
  static constexpr int kRowChunks = Tile::kRowBytes / 16, kRowsOfCopy = 32 / kRowChunks;

  __device__ __forceinline__ TileCopies(const DecodeParams& p, uint32_t shared, int request, int kv_head)
      : p_(p), shared_(shared), request_(request), kv_head_(kv_head), lane_(threadIdx.x % 32) {
    asm volatile("" : "+r"(shared_), "+r"(lane_));  // kept, not found again in every tile
    length_ = min_of(length_of(p.cache_seqlens[request]), p.page_table.num_tokens(request));
    keys_ = visible_keys(length_, p.seqlen_q, p.window_left);
    if (p.page_table.num_pages == 0) keys_.end = keys_.begin;
    cells_ = p.page_table.row(request);
    const auto first_row = [&](const Pages& pages, const uint8_t*& codes, const uint8_t*& scales) {
      codes = pages.codes + kv_head * pages.codes_stride_head + lane_ % kRowChunks * 16;
      scales = pages.scales + kv_head * pages.scales_stride_head;
      if constexpr (kInPages) {
        codes += lane_ / kRowChunks * pages.codes_stride_token;
        scales += lane_ * pages.scales_stride_token;
      }
    };
    first_row(p.k, key_codes_, key_scales_);
    first_row(p.v, value_codes_, value_scales_);
  }

  // The same in all lanes, as the compiler cannot know: what it takes for a branch of single threads keeps descriptors
  // out of uniform registers.
  __device__ __forceinline__ static bool for_all(bool condition) { return __any_sync(~0u, condition); }

  __device__ __forceinline__ uint32_t keys_of(int stage) const { return shared_ + stage * Tile::kBytes; }
  __device__ __forceinline__ uint32_t values_of(int stage) const { return keys_of(kStages + stage); }

  // Asks for the first tiles.
  __device__ __forceinline__ void begin_tiles(int begin, int end) {
    if (begin < end) {
      const int key = begin * kTileKeys;
      cell_ = key / p_.page_table.page_size;
      offset_ahead_ = key - cell_ * p_.page_table.page_size;
      look_up(begin, end);
    }
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) ask(begin + i, end, i);
  }

  // Asks for a tile, if there is one, and for the page of the next.
  __device__ __forceinline__ void ask(int tile, int end, int stage) {
#pragma unroll
    for (int i = 0; i + 2 < kStages; ++i) good_[i] = good_[i + 1];
    if (for_all(tile < end)) {
      const int page = place(tile), offset = offset_ahead_;
      if constexpr (kInPages) {
        offset_ahead_ += kTileKeys;
        if (offset_ahead_ == p_.page_table.page_size) offset_ahead_ = 0, ++cell_;
      }
      look_up(tile + 1, end);
      copy<false>(p_.k, key_codes_, key_scales_, page, offset, keys_of(stage));
      copy<true>(p_.v, value_codes_, value_scales_, page, offset, values_of(stage));
    }
    cp_async_commit();
  }

  // Where chunk `chunk` of a row of values lies in it.
  __device__ __forceinline__ static int value_chunk(int row, int chunk) {
    return kRowChunks == 4 ? chunk ^ row / 8 % 2 * 2 : chunk;
  }

  // kBytes bytes of shared memory as words; fewer than four in the low ones.
  template <int kBytes>
  __device__ __forceinline__ static void load(uint32_t* words, uint32_t from) {
    if constexpr (kBytes == 16) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(from)
                   : "memory");
    } else if constexpr (kBytes == 8) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
    } else if constexpr (kBytes == 4) {
      asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(words[0]) : "r"(from) : "memory");
    } else if constexpr (kBytes == 2) {
      asm volatile("{\n.reg .b16 x;\nld.shared.b16 x, [%1];\ncvt.u32.u16 %0, x;\n}\n"
                   : "=r"(words[0])
                   : "r"(from)
                   : "memory");
    } else {
      asm volatile("ld.shared.u8 %0, [%1];\n" : "=r"(words[0]) : "r"(from) : "memory");
    }
  }

  const DecodeParams& p_;
  uint32_t shared_;
  const int request_, kv_head_;
  int lane_;
  int length_;
  KvRange keys_;
  uint32_t good_[kStages - 1] = {};  // which keys there are of the tiles from the current one on

 private:
  // Asks for the page of a tile's key (kInPages: its first, else `lane_`), a tile before its place is wanted.
  __device__ __forceinline__ void look_up(int tile, int end) {
    if (tile >= end) return;
    if constexpr (kInPages) {
      page_ahead_ = __ldg(cells_ + cell_);
    } else {
      const int key = tile * kTileKeys + lane_, cell = key / p_.page_table.page_size;
      offset_ahead_ = key - cell * p_.page_table.page_size;
      page_ahead_ = key < keys_.end ? __ldg(cells_ + cell) : -1;
    }
  }

  // Notes which keys of the tile there are. Returns the page, or one that exists.
  __device__ __forceinline__ int place(int tile) {
    const int key = tile * kTileKeys + lane_;
    const bool wanted = key >= keys_.begin && key < keys_.end, has_page = p_.page_table.has_page(page_ahead_);
    if (p_.report && wanted && !has_page) {
      const int cell = key / p_.page_table.page_size;
      if (kv_head_ == 0 && (key == cell * p_.page_table.page_size || key == keys_.begin)) {
        record_fault(p_.report,
                     {kReportFp4Decode, ReportKind::kPageIndex, request_, cell, page_ahead_, p_.page_table.num_pages});
      }
    }
    good_[kStages - 2] = __ballot_sync(~0u, wanted && has_page);
    return has_page ? page_ahead_ : 0;
  }

  // A side of a tile, whose keys that are not there lie somewhere in the pool, too. kInPages: `page` and `offset` are
  // its first key's, else key `lane_`'s. A lane copies a chunk of every kRowsOfCopy-th row, and the scales of a row.
  template <bool kValues>
  __device__ __forceinline__ void copy(const Pages& pages, const uint8_t* codes, const uint8_t* scales, int page,
                                       int offset, uint32_t tile) const {
    const uint32_t to = tile + 16 * lane_, to_scales = tile + Tile::kScalesAt + Tile::kScaleBytes * lane_;
    const auto place_of_row = [&](int row) {
      return (to ^ (kValues ? 16 * value_chunk(row, 0) : 0)) + 16 * kRowChunks * row;
    };
    if constexpr (kInPages) {
      const int stride = static_cast<int>(pages.codes_stride_token);
      codes = plus(plus(codes, page, static_cast<int>(pages.codes_stride_page)), offset, stride);
      scales = plus(plus(scales, page, static_cast<int>(pages.scales_stride_page)), offset,
                    static_cast<int>(pages.scales_stride_token));
#pragma unroll
      for (int row = 0; row < kTileKeys; row += kRowsOfCopy) cp_async_16(place_of_row(row), codes + row * stride, true);
      cp_async_few<Tile::kScaleBytes>(to_scales, scales);
    } else {
#pragma unroll
      for (int row = 0; row < kTileKeys; row += kRowsOfCopy) {
        const int64_t page_of_row = __shfl_sync(~0u, page, row + lane_ / kRowChunks);
        const int64_t offset_of_row = __shfl_sync(~0u, offset, row + lane_ / kRowChunks);
        cp_async_16(place_of_row(row),
                    codes + page_of_row * pages.codes_stride_page + offset_of_row * pages.codes_stride_token, true);
      }
      scales += int64_t{page} * pages.scales_stride_page + int64_t{offset} * pages.scales_stride_token;
      if (scales_on(pages, Tile::kScaleBytes)) {
        cp_async_few<Tile::kScaleBytes>(to_scales, scales);
      } else {
#pragma unroll 1
        for (int i = 0; i < Tile::kScaleBytes; ++i) {
          asm volatile("st.shared.u8 [%0], %1;\n" ::"r"(to_scales + i), "r"(uint32_t{__ldg(scales + i)}) : "memory");
        }
      }
    }
  }

  // A product of 32 bits each, and a sum, in one instruction.
  __device__ __forceinline__ static const uint8_t* plus(const uint8_t* pointer, int count, int stride) {
    const uint8_t* sum;
    asm("mad.wide.s32 %0, %1, %2, %3;\n" : "=l"(sum) : "r"(count), "r"(stride), "l"(pointer));
    return sum;
  }

  const int32_t* cells_;
  int page_ahead_ = -1, offset_ahead_ = 0, cell_ = 0;  // where the tile lies that is asked for next
  // The first of the lane's chunks of a head in the pool, and its scales (kInPages: of key `lane_`).
  const uint8_t *key_codes_, *key_scales_, *value_codes_, *value_scales_;
};

}  // namespace attnops::fp4_kv
