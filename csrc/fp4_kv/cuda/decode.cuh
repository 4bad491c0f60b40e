#pragma once
#include <climits>

#include "device/common/pdl.cuh"
#include "device/sm80/mma.cuh"
#include "fp4_kv/cuda/codes.cuh"
#include "fp4_kv/params.h"
#include "scheduler/split_kv.h"

// Decode over pages of four bits. A warp has a KV head of a request and a share of its keys, all its query rows, and
// works alone. Keys are the M of both products, so that few rows waste little:
//   scores^T [16 keys, 8 rows] = K [16, D] q^T, out^T [16 dims, 8 rows] += V^T [16, 16 keys] p^T.
// Codes come from memory into registers, in the order in which a lane's fragments want them; which dims a step of the
// first product holds, and which a tile of the second, is free. So nothing passes through shared memory.
namespace attnops::fp4_kv {

inline constexpr int kTileKeys = 32, kWarps = 4, kRowsOfTile = 8;

// Whether a tile of keys lies in one page, and its rows within 31 bits of each other.
__host__ __device__ inline bool tiles_in_pages(const DecodeParams& p, int tile_keys) {
  const auto near = [&](int64_t stride) { return stride >= 0 && stride < INT_MAX / tile_keys; };
  return p.page_table.page_size % tile_keys == 0 && near(p.k.codes_stride_token) && near(p.k.scales_stride_token) &&
         near(p.v.codes_stride_token) && near(p.v.scales_stride_token);
}

// Lane = 4 g + t. Keys of a tile that a lane holds of K: 16 m + g + 8 h. Of V: 16 s + 2 t + {0, 1, 8, 9}.
// kInPages: `tiles_in_pages`, so that a tile has one address. Else each key has its own.
template <typename T, int kDim, int kRowTiles, bool kInPages>
class WarpDecode {
 public:
  static constexpr int kKeyWords = kDim / 32;    // of a key in a lane: dims [kDim / 4 t, ..)
  static constexpr int kValueWords = kDim / 64;  // dims [kDim / 8 g, ..)
  static constexpr int kSteps = kDim / 16;
  static constexpr int kKeyRows = kTileKeys / 8;  // of a tile in a lane
  static constexpr int kValueRows = kTileKeys / 4;
  static constexpr float kSlack = 8.f;  // a reference moves when a score exceeds it by so many powers of two

  __device__ WarpDecode(const DecodeParams& p, int request, int kv_head, int split)
      : p_(p), request_(request), kv_head_(kv_head), split_(split), lane_(threadIdx.x % 32) {
    length_ = min_of(length_of(p.cache_seqlens[request]), p.page_table.num_tokens(request));
    keys_ = visible_keys(length_, p.seqlen_q, p.window_left);
    if (p.page_table.num_pages == 0) keys_.end = keys_.begin;
    cells_ = p.page_table.row(request);
    score_scale_ = p.softmax_scale * (p.k.scale ? *p.k.scale : 1.f) * kUnit;
  }

  __device__ void run() {
    const int first = keys_.begin / kTileKeys;
    const int count = keys_.end > keys_.begin ? (keys_.end + kTileKeys - 1) / kTileKeys - first : 0;
    const int begin = first + static_cast<int>(int64_t{count} * split_ / p_.num_splits);
    const int end = first + static_cast<int>(int64_t{count} * (split_ + 1) / p_.num_splits);
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
    if (begin < end) {
      look_up(begin, end);
      place(begin);
      look_up(begin + 1, end);
      load_keys();
      load_values();
    }
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      float scores[kTileKeys / 16][kRowTiles][4];
      multiply_keys(scores);
      const uint32_t good = good_;
      if (tile + 1 < end) {
        place(tile + 1);
        look_up(tile + 2, end);
        load_keys();
      }
      soften(tile, good, scores);
      multiply_values(scores);
      if (tile + 1 < end) load_values();
    }
    store();
  }

 private:
  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int t() const { return lane_ % 4; }

  // Asks for the page of a tile's key (kInPages: its first, else `lane_`), a tile before its place is wanted.
  __device__ __forceinline__ void look_up(int tile, int end) {
    if (tile >= end) return;
    const int key = tile * kTileKeys + (kInPages ? 0 : lane_);
    const int cell = key / p_.page_table.page_size;
    offset_ahead_ = key - cell * p_.page_table.page_size;
    page_ahead_ = key < keys_.end ? __ldg(cells_ + cell) : -1;
  }

  // Where the tile's keys lie, and which of them there are.
  __device__ __forceinline__ void place(int tile) {
    const int key = tile * kTileKeys + lane_;
    const bool wanted = key >= keys_.begin && key < keys_.end, has_page = p_.page_table.has_page(page_ahead_);
    if (p_.report && wanted && !has_page) {
      const int cell = key / p_.page_table.page_size;
      if (kv_head_ == 0 && (key == cell * p_.page_table.page_size || key == keys_.begin)) {
        record_fault(p_.report,
                     {kReportFp4Decode, ReportKind::kPageIndex, request_, cell, page_ahead_, p_.page_table.num_pages});
      }
    }
    good_ = __ballot_sync(~0u, wanted && has_page);
    const int page = has_page ? page_ahead_ : 0;
    if constexpr (kInPages) {
      key_codes_at_ =
          p_.k.codes + place_of(p_.k.codes_stride_page, p_.k.codes_stride_token, p_.k.codes_stride_head, page);
      key_scales_at_ =
          p_.k.scales + place_of(p_.k.scales_stride_page, p_.k.scales_stride_token, p_.k.scales_stride_head, page);
      value_codes_at_ =
          p_.v.codes + place_of(p_.v.codes_stride_page, p_.v.codes_stride_token, p_.v.codes_stride_head, page);
      value_scales_at_ =
          p_.v.scales + place_of(p_.v.scales_stride_page, p_.v.scales_stride_token, p_.v.scales_stride_head, page);
    } else {
      page_ = page, offset_ = offset_ahead_;
    }
  }

  __device__ __forceinline__ int64_t place_of(int64_t page_stride, int64_t token_stride, int64_t head_stride,
                                              int page) const {
    return page * page_stride + offset_ahead_ * token_stride + kv_head_ * head_stride;
  }

  // Of key `lane_key` + `fixed_key` of the tile.
  __device__ __forceinline__ void address(const Pages& pages, const uint8_t* codes_at, const uint8_t* scales_at,
                                          int lane_key, int fixed_key, const uint8_t*& codes,
                                          const uint8_t*& scales) const {
    if constexpr (kInPages) {
      const int codes_stride = static_cast<int>(pages.codes_stride_token);
      const int scales_stride = static_cast<int>(pages.scales_stride_token);
      codes = codes_at + (lane_key * codes_stride + fixed_key * codes_stride);
      scales = scales_at + (lane_key * scales_stride + fixed_key * scales_stride);
    } else {
      const int key = lane_key + fixed_key;
      const int64_t page = __shfl_sync(~0u, page_, key), offset = __shfl_sync(~0u, offset_, key);
      codes = pages.codes + page * pages.codes_stride_page + offset * pages.codes_stride_token +
              kv_head_ * pages.codes_stride_head;
      scales = pages.scales + page * pages.scales_stride_page + offset * pages.scales_stride_token +
               kv_head_ * pages.scales_stride_head;
    }
  }

  template <int kWords>
  __device__ __forceinline__ static void load_words(uint32_t (&words)[kWords], const uint8_t* from) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from) + i / 4);
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
      }
    } else if constexpr (kWords % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 2) {
        const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from) + i / 2);
        words[i] = x.x, words[i + 1] = x.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = __ldcs(reinterpret_cast<const uint32_t*>(from) + i);
    }
  }

  // Scores of keys that are not there are hidden later, whatever lies in their place.
  __device__ __forceinline__ void load_keys() {
#pragma unroll
    for (int i = 0; i < kKeyRows; ++i) {
      const uint8_t *codes, *scales;
      address(p_.k, key_codes_at_, key_scales_at_, g(), 8 * i, codes, scales);
      load_words(key_codes_[i], codes + kDim / 8 * t());
      key_scales_[i] = load_scales<kDim / 64>(scales + kDim / 64 * t());
    }
  }

  // kCount scales, 1, 2 or 4, in the low bytes.
  template <int kCount>
  __device__ __forceinline__ static uint32_t load_scales(const uint8_t* from) {
    if constexpr (kCount == 1) {
      return __ldg(from);
    } else if constexpr (kCount == 2) {
      return __ldg(reinterpret_cast<const uint16_t*>(from));
    } else {
      return __ldg(reinterpret_cast<const uint32_t*>(from));
    }
  }

  static constexpr int kValueScales = kDim / 128 > 0 ? kDim / 128 : 1;  // of a key in a lane

  // Values that are not there have scales of zero: what lies in their place may be NaN.
  __device__ __forceinline__ void load_values() {
    const auto fixed_key = [](int i) { return 16 * (i / 4) + 8 * (i / 2 % 2) + i % 2; };
#pragma unroll
    for (int i = 0; i < kValueRows; ++i) {
      const uint8_t *codes, *scales;
      address(p_.v, value_codes_at_, value_scales_at_, 2 * t(), fixed_key(i), codes, scales);
      load_words(value_codes_[i], codes + kDim / 16 * g());
      value_scales_[i] = load_scales<kValueScales>(scales + kDim / 8 * g() / kBlock);
    }
    if (good_ == ~0u) return;
#pragma unroll
    for (int i = 0; i < kValueRows; ++i) {
      if (!(good_ >> (2 * t() + fixed_key(i)) & 1)) value_scales_[i] = 0;
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
      const auto at = [&](int d) { return row < rows ? static_cast<float>(q[d]) : 0.f; };
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int d = s / 2 * 8 + s % 2 * 2;
        query_[s][n][0] = pack2<__half>(at(d), at(d + 4));
        query_[s][n][1] = pack2<__half>(at(d + 1), at(d + 5));
      }
    }
  }

  // The scale of word `word` of a lane's key, in both halves. Two words share one.
  __device__ __forceinline__ static __half2 scale_of_word(uint32_t scales, int word) {
    const __half2 pair = scale_pair(scales >> (word / 4 * 16) & 0xffff);
    return word / 2 % 2 == 0 ? __low2half2(pair) : __high2half2(pair);
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[kTileKeys / 16][kRowTiles][4]) {
#pragma unroll
    for (int m = 0; m < kTileKeys / 16; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.f;
      }
#pragma unroll
      for (int word = 0; word < kKeyWords; ++word) {
        const __half2 low = scale_of_word(key_scales_[2 * m], word), high = scale_of_word(key_scales_[2 * m + 1], word);
        uint32_t first[4], second[4];
        code_pairs(key_codes_[2 * m][word], first);
        code_pairs(key_codes_[2 * m + 1][word], second);
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

  // Hides what rows do not see. Scores are in units of log2 then.
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
            const int in_tile = 16 * m + 8 * h + g(), key = tile * kTileKeys + in_tile;
            if (key < begin || key > position || !(good >> in_tile & 1)) scores[m][n][2 * h + c] = -INFINITY;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void soften(int tile, uint32_t good, float (&scores)[kTileKeys / 16][kRowTiles][4]) {
    const float factor = p_.logit_cap > 0.f ? score_scale_ / p_.logit_cap : score_scale_ * kLog2e;
#pragma unroll
    for (int m = 0; m < kTileKeys / 16; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] *= factor;
      }
    }
    if (p_.logit_cap > 0.f) {
#pragma unroll
      for (int m = 0; m < kTileKeys / 16; ++m) {
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[m][n][i] = p_.logit_cap * kLog2e * tanhf(scores[m][n][i]);
        }
      }
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
        most[n][c] = x;
        above |= x > top_[n][c] + kSlack;  // false for -inf above -inf
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
            x = exp2_approx(x - reference);
            sum_[n][c] += x;
          }
        }
      }
    }
  }

  __device__ __noinline__ static float column_max(float x) {
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

  __device__ __forceinline__ void multiply_values(const float (&scores)[kTileKeys / 16][kRowTiles][4]) {
#pragma unroll
    for (int s = 0; s < kTileKeys / 16; ++s) {
      uint32_t probs[kRowTiles][2];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        probs[n][0] = transpose_8x8(pack2<__half>(scores[s][n][0], scores[s][n][1]));
        probs[n][1] = transpose_8x8(pack2<__half>(scores[s][n][2], scores[s][n][3]));
      }
#pragma unroll
      for (int u = 0; u < kValueWords; ++u) {
        // Dims 8 u + i and 8 u + 4 + i of two pairs of keys.
        uint32_t low[2][4], high[2][4];
        __half2 scales[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int row = 4 * s + 2 * pair;
          code_pairs(__byte_perm(value_codes_[row][u], value_codes_[row + 1][u], 0x5410), low[pair]);
          code_pairs(__byte_perm(value_codes_[row][u], value_codes_[row + 1][u], 0x7632), high[pair]);
          scales[pair] = scale_pair(__byte_perm(value_scales_[row], value_scales_[row + 1], u / 2 == 0 ? 0x40 : 0x51));
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
  const int request_, kv_head_, split_, lane_;
  int length_;
  KvRange keys_;
  const int32_t* cells_;
  float score_scale_;
  int page_ahead_ = -1, offset_ahead_ = 0;  // where the tile after that which is loaded next lies
  int page_ = 0, offset_ = 0;  // of key `lane_` of the tile that is loaded next; or, kInPages, of its first:
  const uint8_t *key_codes_at_ = nullptr, *key_scales_at_ = nullptr;
  const uint8_t *value_codes_at_ = nullptr, *value_scales_at_ = nullptr;
  uint32_t good_ = 0;  // which of its keys there are
  uint32_t key_codes_[kKeyRows][kKeyWords], key_scales_[kKeyRows];
  uint32_t value_codes_[kValueRows][kValueWords], value_scales_[kValueRows];
  uint32_t query_[kSteps][kRowTiles][2];
  float out_[kSteps][kRowTiles][4];
  float top_[kRowTiles][2], sum_[kRowTiles][2];  // of rows 2 t and 2 t + 1; sums of this lane's keys
};

template <typename T, int kDim, int kRowTiles, bool kInPages>
__global__ void __launch_bounds__(kWarps * 32) fp4_decode_kernel(const __grid_constant__ DecodeParams p) {
  wait_for_earlier_kernels();
  const int64_t work = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t works = int64_t{p.batch_size} * p.num_kv_heads * p.num_splits;
  if (work < works) {
    const int kv_head = static_cast<int>(work % p.num_kv_heads);
    const int64_t rest = work / p.num_kv_heads;
    const int split = static_cast<int>(rest % p.num_splits), request = static_cast<int>(rest / p.num_splits);
    WarpDecode<T, kDim, kRowTiles, kInPages>(p, request, kv_head, split).run();
  }
  let_next_kernel_start();
}

}  // namespace attnops::fp4_kv
