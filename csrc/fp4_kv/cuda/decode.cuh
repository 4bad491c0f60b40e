#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm80/mma.cuh"
#include "fp4_kv/cuda/codes.cuh"
#include "fp4_kv/cuda/tile.cuh"
#include "fp4_kv/params.h"
#include "scheduler/split_kv.h"

// Decode over pages of four bits. A warp has a KV head of a request and a share of its keys, all its query rows, and
// works alone. Keys are the M of both products, so that few rows waste little:
//   scores^T [16 keys, 8 rows] = K [16, D] q^T, out^T [16 dims, 8 rows] += V^T [16, 16 keys] p^T.
// Codes come into shared memory as they lie in pages, two tiles ahead, and from there in the order in which a lane's
// fragments want them: which dims a step of the first product holds, and which a tile of the second, is free.
namespace attnops::fp4_kv {

// Lane = 4 g + t. Index m of 16 keys, in both products, is key `order(m)` of them: a lane has indices g and g + 8 of K,
// and 2 t + {0, 1, 8, 9} of V, which are keys 4 t + 0 .. 3.
// kInPages: `tiles_in_pages` and scales on boundaries, so that a tile has one address. Else each key has its own.
template <typename T, int kDim, int kRowTiles, bool kInPages>
class WarpDecode {
 public:
  using Tile = SideTile<kDim>;
  static constexpr int kKeyWords = kDim / 32;    // of a key in a lane: dims [kDim / 4 t, ..)
  static constexpr int kValueWords = kDim / 64;  // dims [kDim / 8 g, ..)
  static constexpr int kSteps = kDim / 16;
  static constexpr int kRowChunks = Tile::kRowBytes / 16, kRowsOfCopy = 32 / kRowChunks;
  static constexpr float kSlack = 8.f;  // a reference moves when a score exceeds it by so many powers of two

  __device__ WarpDecode(const DecodeParams& p, uint32_t shared, int request, int kv_head, int split)
      : p_(p), shared_(shared), request_(request), kv_head_(kv_head), split_(split), lane_(threadIdx.x % 32) {
    asm volatile("" : "+r"(shared_), "+r"(lane_));  // kept, not found again in every tile
    length_ = min_of(length_of(p.cache_seqlens[request]), p.page_table.num_tokens(request));
    keys_ = visible_keys(length_, p.seqlen_q, p.window_left);
    if (p.page_table.num_pages == 0) keys_.end = keys_.begin;
    cells_ = p.page_table.row(request);
    score_scale_ = p.softmax_scale * (p.k.scale ? *p.k.scale : 1.f) * kUnit;
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

  __device__ void run() {
    const int first = keys_.begin / kTileKeys;
    const int count = keys_.end > keys_.begin ? (keys_.end + kTileKeys - 1) / kTileKeys - first : 0;
    const int begin = first + static_cast<int>(int64_t{count} * split_ / p_.num_splits);
    const int end = first + static_cast<int>(int64_t{count} * (split_ + 1) / p_.num_splits);
    if (begin < end) {
      const int key = begin * kTileKeys;
      cell_ = key / p_.page_table.page_size;
      offset_ahead_ = key - cell_ * p_.page_table.page_size;
      look_up(begin, end);
    }
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) ask(begin + i, end, i);
    load_queries();
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) top_[n][i] = -INFINITY, sum_[n][i] = 0.f;
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.f;
      }
    }
    int stage = 0;
#pragma unroll 1
    for (int tile = begin; for_all(tile < end); ++tile) {
      cp_async_wait<kStages - 2>();
      __syncwarp();  // all lanes' copies are here, and nobody reads the last tile any more
      const uint32_t good = good_[0];
      ask(tile + kStages - 1, end, stage == 0 ? kStages - 1 : stage - 1);
      float scores[kTileKeys / 16][kRowTiles][4];
      multiply_keys(keys_of(stage), scores);
      soften(tile, good, scores);
      multiply_values(values_of(stage), good, scores);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    store();
  }

 private:
  // The same in all lanes, as the compiler cannot know: what it takes for a branch of single threads keeps descriptors
  // out of uniform registers.
  __device__ __forceinline__ static bool for_all(bool condition) { return __any_sync(~0u, condition); }

  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int t() const { return lane_ % 4; }
  __device__ __forceinline__ uint32_t keys_of(int stage) const { return shared_ + stage * Tile::kBytes; }
  __device__ __forceinline__ uint32_t values_of(int stage) const { return keys_of(kStages + stage); }

  // Neighbouring lanes read neighbouring rows of values first, one of each parity: so they meet other banks.
  __device__ __forceinline__ static int order(int m) {
    const int t = m / 2 % 4;
    return 4 * t + m / 8 * 2 + (m % 2 ^ t % 2);
  }
  // Where chunk `chunk` of a row of values lies in it.
  __device__ __forceinline__ static int value_chunk(int row, int chunk) {
    return kRowChunks == 4 ? chunk ^ row / 8 % 2 * 2 : chunk;
  }

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

  // Row `row` of the query rows is token row / group, head row % group; rows behind the last are zeros.
  __device__ __forceinline__ void load_queries() {
    const int group = p_.num_q_heads / p_.num_kv_heads, rows = p_.seqlen_q * group;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = kRowsOfTile * n + g(), token = row / group, head = kv_head_ * group + row % group;
      const T* q = static_cast<const T*>(p_.q) + request_ * p_.q_stride_request + token * p_.q_stride_token +
                   head * p_.q_stride_head + kDim / 4 * t();
      const float sign = score_scale_ < 0.f ? -1.f : 1.f;  // scores are to be multiplied by what is not below 0
      const auto at = [&](int d) { return row < rows ? sign * static_cast<float>(q[d]) : 0.f; };
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int d = s / 2 * 8 + s % 2 * 2;
        query_[s][n][0] = pack2<__half>(at(d), at(d + 4));
        query_[s][n][1] = pack2<__half>(at(d + 1), at(d + 5));
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(uint32_t keys, float (&scores)[kTileKeys / 16][kRowTiles][4]) {
    constexpr int kRow = Tile::kRowBytes, kScales = kDim / 64;  // scales of a key in a lane
    const uint32_t codes_at = keys + order(g()) * kRow + kDim / 8 * t();
    const uint32_t scales_at = keys + Tile::kScalesAt + order(g()) * Tile::kScaleBytes + kScales * t();
    uint32_t codes[kTileKeys / 16][2][kKeyWords];
    __half2 scales[kTileKeys / 16][2];
#pragma unroll
    for (int m = 0; m < kTileKeys / 16; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * m + 2 * h;
        uint32_t bytes[1];
        load<kDim / 8>(codes[m][h], codes_at + row * kRow);
        load<kScales>(bytes, scales_at + row * Tile::kScaleBytes);
        scales[m][h] = scale_pair(bytes[0]);
      }
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.f;
      }
    }
    // Sixteen keys are a chain of products, so both of a tile take turns.
#pragma unroll
    for (int word = 0; word < kKeyWords; ++word) {
#pragma unroll
      for (int m = 0; m < kTileKeys / 16; ++m) {
        const bool second_block = word / 2 % 2 == 1;
        const __half2 low = second_block ? __high2half2(scales[m][0]) : __low2half2(scales[m][0]);
        const __half2 high = second_block ? __high2half2(scales[m][1]) : __low2half2(scales[m][1]);
        uint32_t first[4], second[4];
        code_pairs(codes[m][0][word], first);
        code_pairs(codes[m][1][word], second);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t a[4] = {times(first[2 * half], low), times(second[2 * half], high),
                                 times(first[2 * half + 1], low), times(second[2 * half + 1], high)};
          const int step = 2 * word + half;
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            mma_m16n8k16<__half>(scores[m][n], a, query_[step][n][0], query_[step][n][1]);
          }
        }
      }
    }
  }

  // Hides what rows do not see.
  __device__ __forceinline__ void mask(int tile, uint32_t good, float (&scores)[kTileKeys / 16][kRowTiles][4]) const {
    const int group = p_.num_q_heads / p_.num_kv_heads;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = min_of((kRowsOfTile * n + 2 * t() + c) / group, p_.seqlen_q - 1);
        const int position = length_ - p_.seqlen_q + token;
        const int begin = p_.window_left < 0 ? 0 : position - p_.window_left;
#pragma unroll
        for (int m = 0; m < kTileKeys / 16; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int in_tile = 16 * m + 2 * h + order(g()), key = tile * kTileKeys + in_tile;
            if (key < begin || key > position || !(good >> in_tile & 1)) scores[m][n][2 * h + c] = -INFINITY;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void soften(int tile, uint32_t good, float (&scores)[kTileKeys / 16][kRowTiles][4]) {
    // A score in units of log2 is its product with a factor. Caps, and factors that leave nothing of -inf, come first.
    float factor = fabsf(score_scale_) * kLog2e;
    if (p_.logit_cap > 0.f || !(factor > 1e-30f)) {
      const float before = p_.logit_cap > 0.f ? __fdividef(fabsf(score_scale_), p_.logit_cap) : factor;
#pragma unroll
      for (int m = 0; m < kTileKeys / 16; ++m) {
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
          for (float& x : scores[m][n]) {
            x *= before;
            if (p_.logit_cap > 0.f) x = p_.logit_cap * kLog2e * tanhf(x);
          }
        }
      }
      factor = 1.f;
    }
    const int all_begin = p_.window_left < 0 ? 0 : length_ - 1 - p_.window_left;
    const int first = tile * kTileKeys;
    if (good != ~0u || first < all_begin || first + kTileKeys > length_ - p_.seqlen_q + 1) mask(tile, good, scores);

    bool above = false;
    float most[kRowTiles][2];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = -INFINITY;
#pragma unroll
        for (int m = 0; m < kTileKeys / 16; ++m) x = fmaxf(x, fmaxf(scores[m][n][c], scores[m][n][2 + c]));
        most[n][c] = x * factor;
        above |= most[n][c] > top_[n][c] + kSlack;  // false for -inf above -inf
      }
    }
    if (__any_sync(~0u, above)) move_references(most);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float reference = top_[n][c] == -INFINITY ? 0.f : top_[n][c];
#pragma unroll
        for (int m = 0; m < kTileKeys / 16; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& x = scores[m][n][2 * h + c];
            x = exp2_approx(fmaf(x, factor, -reference));
            sum_[n][c] += x;
          }
        }
      }
    }
  }

  __device__ __forceinline__ static float column_max(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
  }

  __device__ __forceinline__ void move_references(const float (&most)[kRowTiles][2]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float next = fmaxf(top_[n][c], column_max(most[n][c]));
        const float shrink = next == -INFINITY ? 1.f : exp2_approx(top_[n][c] - next);
        top_[n][c] = next, sum_[n][c] *= shrink;
#pragma unroll
        for (int m = 0; m < kSteps; ++m) out_[m][n][c] *= shrink, out_[m][n][2 + c] *= shrink;
      }
    }
  }

  // Values that are not there get scales of zero: what lies in their place may be NaN.
  __device__ __forceinline__ void multiply_values(uint32_t values, uint32_t good,
                                                  const float (&scores)[kTileKeys / 16][kRowTiles][4]) {
    constexpr int kRow = Tile::kRowBytes, kLaneBytes = kDim / 16;  // of a key in a lane
    const int own = order(2 * t());  // 4 t + (0 or 1), and the other one of these is the next
    const uint32_t codes_at =
        values + own * kRow + 16 * value_chunk(own, kLaneBytes * g() / 16) + kLaneBytes * g() % 16;
    const uint32_t scales_at = values + Tile::kScalesAt + own * Tile::kScaleBytes + kDim / 8 * g() / kBlock;
    uint32_t bytes[kTileKeys / 4];  // scales of rows 16 (i / 4) + order(2 t + i % 2) + 2 (i / 2 % 2)
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) {
      load<1>(&bytes[i],
              (scales_at ^ i % 2 * Tile::kScaleBytes) + (16 * (i / 4) + 2 * (i / 2 % 2)) * Tile::kScaleBytes);
    }
    if (good != ~0u) {
#pragma unroll
      for (int i = 0; i < kTileKeys / 4; ++i) {
        if (!(good >> (16 * (i / 4) + 2 * (i / 2 % 2) + order(2 * t() + i % 2)) & 1)) bytes[i] = 0;
      }
    }
#pragma unroll
    for (int s = 0; s < kTileKeys / 16; ++s) {
      uint32_t probs[kRowTiles][2];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        probs[n][0] = transpose_8x8(pack2<__half>(scores[s][n][0], scores[s][n][1]));
        probs[n][1] = transpose_8x8(pack2<__half>(scores[s][n][2], scores[s][n][3]));
      }
      uint32_t codes[4][kValueWords];
      __half2 scales[2];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          load<kLaneBytes>(codes[2 * pair + i], (codes_at ^ i * kRow) + (16 * s + 2 * pair) * kRow);
        scales[pair] = scale_pair(bytes[4 * s + 2 * pair] | bytes[4 * s + 2 * pair + 1] << 8);
      }
#pragma unroll
      for (int u = 0; u < kValueWords; ++u) {
        // Dims 8 u + i and 8 u + 4 + i of two pairs of keys.
        uint32_t low[2][4], high[2][4];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          code_pairs(__byte_perm(codes[2 * pair][u], codes[2 * pair + 1][u], 0x5410), low[pair]);
          code_pairs(__byte_perm(codes[2 * pair][u], codes[2 * pair + 1][u], 0x7632), high[pair]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t a[4] = {times(low[0][i], scales[0]), times(high[0][i], scales[0]), times(low[1][i], scales[1]),
                                 times(high[1][i], scales[1])};
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) mma_m16n8k16<__half>(out_[4 * u + i][n], a, probs[n][0], probs[n][1]);
        }
      }
    }
  }

  // The share's result, divided by its sum; -inf where it has no key.
  __device__ __forceinline__ void store() {
    const int group = p_.num_q_heads / p_.num_kv_heads, rows = p_.seqlen_q * group;
    const float v_scale = (p_.v.scale ? *p_.v.scale : 1.f) * kUnit;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = sum_[n][c];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        const int row = kRowsOfTile * n + 2 * t() + c;
        if (row >= rows) continue;
        const int token = row / group, head = kv_head_ * group + row % group;
        const int64_t at = ((int64_t{split_} * p_.batch_size + request_) * p_.seqlen_q + token) * p_.num_q_heads + head;
        const bool empty = sum == 0.f;
        const float factor = empty ? 0.f : v_scale / sum;
        if (g() == 0) p_.lse_partial[at] = empty ? -INFINITY : top_[n][c] + log2f(sum);
        float4* to = reinterpret_cast<float4*>(p_.out_partial + at * kDim + kDim / 8 * g());
#pragma unroll
        for (int u = 0; u < kValueWords; ++u) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const auto value = [&](int i) { return empty ? 0.f : out_[4 * u + i][n][2 * half + c] * factor; };
            to[2 * u + half] = {value(0), value(1), value(2), value(3)};
          }
        }
      }
    }
  }

  const DecodeParams& p_;
  uint32_t shared_;
  const int request_, kv_head_, split_;
  int lane_;
  int length_;
  KvRange keys_;
  const int32_t* cells_;
  float score_scale_;
  int page_ahead_ = -1, offset_ahead_ = 0, cell_ = 0;  // where the tile lies that is asked for next
  // The first of the lane's chunks of a head in the pool, and its scales (kInPages: of key `lane_`).
  const uint8_t *key_codes_, *key_scales_, *value_codes_, *value_scales_;
  uint32_t good_[kStages - 1] = {};  // which keys there are of the tiles from the current one on
  uint32_t query_[kSteps][kRowTiles][2];
  float out_[kSteps][kRowTiles][4];
  float top_[kRowTiles][2], sum_[kRowTiles][2];  // of rows 2 t and 2 t + 1; sums of this lane's keys
};

}  // namespace attnops::fp4_kv
