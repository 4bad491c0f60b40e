#pragma once
#include <climits>

#include "device/common/pdl.cuh"
#include "device/sm80/mma.cuh"
#include "fp4_kv/cuda/codes.cuh"
#include "fp4_kv/params.h"
#include "scheduler/split_kv.h"

// MLA decode over latents of four bits: rows of 576 values, whose first 512 are V, too. A CTA of four warps has up to
// 16 query rows of a request and a share of its keys, in tiles of 64:
//   scores^T [16 keys, 16 rows] = K [16, 576] q^T, the keys of a tile dealt out to the warps;
//   out^T [128 dims, 16 rows] += V^T [128, 64 keys] p^T, the dims dealt out.
// Codes come from memory into the registers of who multiplies them, as in decode.cuh. A tile's second reading is of L1.
// Queries and probabilities lie in shared memory, as fragments.
namespace attnops::fp4_kv {

inline constexpr int kLatentDim = 576, kLatentDimV = 512, kLatentRows = 16, kLatentKeys = 64, kLatentWarps = 4;

struct LatentShared {
  uint2 queries[kLatentDim / 16][2][32];         // of a step, eight rows, a lane
  uint2 probabilities[kLatentKeys / 16][2][32];  // of sixteen keys, eight rows, a lane
  float most[kLatentWarps][kLatentRows];
};

// Lane = 4 g + t. Of K a lane has keys g and g + 8 of its warp's sixteen, dims 64 c + 16 t + 0 .. 15. Of V it has dims
// 128 warp + 16 g + 0 .. 15 of keys 16 s + 2 t + {0, 1, 8, 9}.
// kInPages: a tile lies in one page (`tiles_in_pages`), so that it has one address. Else each key has its own.
template <typename T, bool kInPages>
class LatentDecode {
 public:
  static constexpr int kChunks = kLatentDim / 64, kValueRows = kLatentKeys / 4;
  static constexpr float kSlack = 8.f;  // a reference moves when a score exceeds it by so many powers of two

  __device__ LatentDecode(const DecodeParams& p, LatentShared& shared, int request, int first_row, int split)
      : p_(p),
        shared_(shared),
        request_(request),
        first_row_(first_row),
        split_(split),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {
    length_ = min_of(length_of(p.cache_seqlens[request]), p.page_table.num_tokens(request));
    keys_ = visible_keys(length_, p.seqlen_q, p.window_left);
    if (p.page_table.num_pages == 0) keys_.end = keys_.begin;
    cells_ = p.page_table.row(request);
    score_scale_ = p.softmax_scale * (p.k.scale ? *p.k.scale : 1.f) * kUnit;
  }

  __device__ void run() {
    const int first = keys_.begin / kLatentKeys;
    const int count = keys_.end > keys_.begin ? (keys_.end + kLatentKeys - 1) / kLatentKeys - first : 0;
    const int begin = first + static_cast<int>(int64_t{count} * split_ / p_.num_splits);
    const int end = first + static_cast<int>(int64_t{count} * (split_ + 1) / p_.num_splits);
    if (begin < end) {
      look_up(begin, end);
      place(begin);
      look_up(begin + 1, end);
      load_keys();
    }
    load_queries();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) top_[n][c] = -INFINITY, sum_[n][c] = 0.f;
#pragma unroll
      for (int m = 0; m < 8; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[m][n][i] = 0.f;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      float scores[2][4];
      multiply_keys(scores);
      load_values();
      const uint32_t good = warp_ < 2 ? good_[0] >> (16 * warp_) : good_[1] >> (16 * warp_ - 32);
      if (tile + 1 < end) {
        place(tile + 1);
        look_up(tile + 2, end);
        load_keys();
      }
      soften(tile, good, scores);
      __syncthreads();
      multiply_values();
    }
    store();
  }

 private:
  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int t() const { return lane_ % 4; }
  __device__ __forceinline__ int rows() const { return p_.seqlen_q * p_.num_q_heads; }

  // Asks for the pages of a tile (kInPages: of its first key; else of keys `lane` and 32 + `lane`), a tile before its
  // place is wanted. Every warp asks for all.
  __device__ __forceinline__ void look_up(int tile, int end) {
    if (tile >= end) return;
#pragma unroll
    for (int half = 0; half < kParts; ++half) {
      const int key = tile * kLatentKeys + (kInPages ? 0 : 32 * half + lane_);
      const int cell = key / p_.page_table.page_size;
      offset_ahead_[half] = key - cell * p_.page_table.page_size;
      page_ahead_[half] = key < keys_.end ? __ldg(cells_ + cell) : -1;
    }
  }

  // Where the tile's keys lie, and which of them there are.
  __device__ __forceinline__ void place(int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int part = kInPages ? 0 : half, key = tile * kLatentKeys + 32 * half + lane_;
      const bool wanted = key >= keys_.begin && key < keys_.end, has_page = p_.page_table.has_page(page_ahead_[part]);
      if (p_.report && wanted && !has_page && warp_ == 0 && first_row_ == 0) {
        const int cell = key / p_.page_table.page_size;
        if (key == cell * p_.page_table.page_size || key == keys_.begin) {
          record_fault(p_.report, {kReportFp4Decode, ReportKind::kPageIndex, request_, cell, page_ahead_[part],
                                   p_.page_table.num_pages});
        }
      }
      good_[half] = __ballot_sync(~0u, wanted && has_page);
      page_[part] = has_page ? page_ahead_[part] : 0;
      offset_[part] = offset_ahead_[part];
    }
    if constexpr (kInPages) {
      codes_at_ = p_.k.codes + page_[0] * p_.k.codes_stride_page + offset_[0] * p_.k.codes_stride_token;
      scales_at_ = p_.k.scales + page_[0] * p_.k.scales_stride_page + offset_[0] * p_.k.scales_stride_token;
    }
  }

  // Of key `lane_key` + `fixed_key` of the tile's half.
  __device__ __forceinline__ void address(int half, int lane_key, int fixed_key, const uint8_t*& codes,
                                          const uint8_t*& scales) const {
    if constexpr (kInPages) {
      const int codes_stride = static_cast<int>(p_.k.codes_stride_token);
      const int scales_stride = static_cast<int>(p_.k.scales_stride_token);
      codes = codes_at_ + (lane_key * codes_stride + (32 * half + fixed_key) * codes_stride);
      scales = scales_at_ + (lane_key * scales_stride + (32 * half + fixed_key) * scales_stride);
    } else {
      const int key = lane_key + fixed_key;
      const int64_t page = __shfl_sync(~0u, page_[half], key), offset = __shfl_sync(~0u, offset_[half], key);
      codes = p_.k.codes + page * p_.k.codes_stride_page + offset * p_.k.codes_stride_token;
      scales = p_.k.scales + page * p_.k.scales_stride_page + offset * p_.k.scales_stride_token;
    }
  }

  // Scores of keys that are not there are hidden later, whatever lies in their place.
  __device__ __forceinline__ void load_keys() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint8_t *codes, *scales;
      const int key = 16 * (warp_ % 2) + g();
      if (kInPages) {
        address(0, key + 32 * (warp_ / 2), 8 * h, codes, scales);
      } else if (warp_ < 2) {
        address(0, key, 8 * h, codes, scales);
      } else {
        address(1, key, 8 * h, codes, scales);
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        key_codes_[h][c] = __ldg(reinterpret_cast<const uint2*>(codes + 32 * c + 8 * t()));
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) key_scales_[h][c] = __ldg(scales + 4 * c + t());
    }
  }

  // Values that are not there have scales of zero: what lies in their place may be NaN.
  __device__ __forceinline__ void load_values() {
    const auto fixed_key = [](int i) { return 16 * (i / 4 % 2) + 8 * (i / 2 % 2) + i % 2; };
#pragma unroll
    for (int i = 0; i < kValueRows; ++i) {
      const uint8_t *codes, *scales;
      address(i / 8, 2 * t(), fixed_key(i), codes, scales);
      value_codes_[i] = __ldg(reinterpret_cast<const uint2*>(codes + 64 * warp_ + 8 * g()));
      value_scales_[i] = __ldg(scales + 8 * warp_ + g());
    }
    if ((good_[0] & good_[1]) == ~0u) return;
#pragma unroll
    for (int i = 0; i < kValueRows; ++i) {
      if (!(good_[i / 8] >> (2 * t() + fixed_key(i)) & 1)) value_scales_[i] = 0;
    }
  }

  // Row r of the CTA is row first_row + r of the request's: token row / heads, head row % heads. Others are zeros.
  __device__ __forceinline__ void load_queries() {
    for (int i = threadIdx.x; i < kLatentDim / 16 * 2 * 32; i += 32 * kLatentWarps) {
      const int lane = i % 32, n = i / 32 % 2, step = i / 64, row = first_row_ + 8 * n + lane / 4;
      const int token = row / p_.num_q_heads, head = row - token * p_.num_q_heads;
      const T* q = static_cast<const T*>(p_.q) + request_ * p_.q_stride_request + token * p_.q_stride_token +
                   head * p_.q_stride_head + 64 * (step / 4) + 16 * (lane % 4) + 8 * (step / 2 % 2) + 2 * (step % 2);
      const auto at = [&](int d) { return row < rows() ? static_cast<float>(q[d]) : 0.f; };
      shared_.queries[step][n][lane] = {pack2<__half>(at(0), at(4)), pack2<__half>(at(1), at(5))};
    }
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = 0.f;
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const __half2 scales = scale_pair(key_scales_[0][c] | key_scales_[1][c] << 8);
      const __half2 low = __low2half2(scales), high = __high2half2(scales);
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        uint32_t first[4], second[4];
        code_pairs(word == 0 ? key_codes_[0][c].x : key_codes_[0][c].y, first);
        code_pairs(word == 0 ? key_codes_[1][c].x : key_codes_[1][c].y, second);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t a[4] = {times(first[2 * half], low), times(second[2 * half], high),
                                 times(first[2 * half + 1], low), times(second[2 * half + 1], high)};
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const uint2 q = shared_.queries[4 * c + 2 * word + half][n][lane_];
            mma_m16n8k16<__half>(scores[n], a, q.x, q.y);
          }
        }
      }
    }
  }

  // Hides what rows do not see. `good`: which of the warp's keys there are.
  __device__ __forceinline__ void mask(int tile, uint32_t good, float (&scores)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = first_row_ + 8 * n + 2 * t() + c, token = min_of(row / p_.num_q_heads, p_.seqlen_q - 1);
        const int position = length_ - p_.seqlen_q + token;
        const int begin = p_.window_left < 0 ? 0 : position - p_.window_left;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int own = 8 * h + g(), key = tile * kLatentKeys + 16 * warp_ + own;
          if (key < begin || key > position || !(good >> own & 1)) scores[n][2 * h + c] = -INFINITY;
        }
      }
    }
  }

  // Scores become probabilities, in shared memory. All warps have the same references.
  __device__ __forceinline__ void soften(int tile, uint32_t good, float (&scores)[2][4]) {
    const float factor = p_.logit_cap > 0.f ? score_scale_ / p_.logit_cap : score_scale_ * kLog2e;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= factor;
    }
    if (p_.logit_cap > 0.f) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = p_.logit_cap * kLog2e * tanhf(scores[n][i]);
      }
    }
    const int all_begin = p_.window_left < 0 ? 0 : length_ - 1 - p_.window_left;
    const int first = tile * kLatentKeys + 16 * warp_;
    if ((good & 0xffff) != 0xffff || first < all_begin || first + 16 > length_ - p_.seqlen_q + 1) {
      mask(tile, good, scores);
    }
    bool above = false;
    float most[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        most[n][c] = fmaxf(scores[n][c], scores[n][2 + c]);
        above |= most[n][c] > top_[n][c] + kSlack;  // false for -inf above -inf
      }
    }
    // Nobody reads the last tile's probabilities any more, when all are here.
    if (__syncthreads_or(above)) move_references(most);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float reference = top_[n][c] == -INFINITY ? 0.f : top_[n][c];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = scores[n][2 * h + c];
          x = exp2_approx(x - reference);
          sum_[n][c] += x;
        }
      }
      shared_.probabilities[warp_][n][lane_] = {transpose_8x8(pack2<__half>(scores[n][0], scores[n][1])),
                                                transpose_8x8(pack2<__half>(scores[n][2], scores[n][3]))};
    }
  }

  __device__ __noinline__ static float column_max(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
  }

  __device__ __forceinline__ void move_references(const float (&most)[2][2]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float own = column_max(most[n][c]);
        if (g() == 0) shared_.most[warp_][8 * n + 2 * t() + c] = own;
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float next = top_[n][c];
#pragma unroll
        for (int warp = 0; warp < kLatentWarps; ++warp) next = fmaxf(next, shared_.most[warp][8 * n + 2 * t() + c]);
        const float shrink = next == -INFINITY ? 1.f : exp2_approx(top_[n][c] - next);
        top_[n][c] = next, sum_[n][c] *= shrink;
#pragma unroll
        for (int m = 0; m < 8; ++m) out_[m][n][c] *= shrink, out_[m][n][2 + c] *= shrink;
      }
    }
  }

  __device__ __forceinline__ void multiply_values() {
#pragma unroll
    for (int s = 0; s < kLatentKeys / 16; ++s) {
      const uint2 probs[2] = {shared_.probabilities[s][0][lane_], shared_.probabilities[s][1][lane_]};
      __half2 scales[2];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = 4 * s + 2 * pair;
        scales[pair] = scale_pair(value_scales_[row] | value_scales_[row + 1] << 8);
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        // Dims 8 u + i and 8 u + 4 + i of two pairs of keys.
        uint32_t low[2][4], high[2][4];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint2 first = value_codes_[4 * s + 2 * pair], second = value_codes_[4 * s + 2 * pair + 1];
          const uint32_t one = u == 0 ? first.x : first.y, other = u == 0 ? second.x : second.y;
          code_pairs(__byte_perm(one, other, 0x5410), low[pair]);
          code_pairs(__byte_perm(one, other, 0x7632), high[pair]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t a[4] = {times(low[0][i], scales[0]), times(high[0][i], scales[0]), times(low[1][i], scales[1]),
                                 times(high[1][i], scales[1])};
#pragma unroll
          for (int n = 0; n < 2; ++n) mma_m16n8k16<__half>(out_[4 * u + i][n], a, probs[n].x, probs[n].y);
        }
      }
    }
  }

  // The share's result, divided by its sum; -inf where it has no key.
  __device__ __forceinline__ void store() {
    const float v_scale = (p_.k.scale ? *p_.k.scale : 1.f) * kUnit;
    float own[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        own[n][c] = sum_[n][c];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) own[n][c] += __shfl_xor_sync(~0u, own[n][c], lanes);
      }
    }
    __syncthreads();  // nobody reads the last references any more
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (g() == 0) shared_.most[warp_][8 * n + 2 * t() + c] = own[n][c];
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < kLatentWarps; ++warp) sum += shared_.most[warp][8 * n + 2 * t() + c];
        const int row = first_row_ + 8 * n + 2 * t() + c;
        if (row >= rows()) continue;
        const int64_t at = (int64_t{split_} * p_.batch_size + request_) * rows() + row;
        const bool empty = sum == 0.f;
        const float factor = empty ? 0.f : v_scale / sum;
        if (g() == 0 && warp_ == 0) p_.lse_partial[at] = empty ? -INFINITY : top_[n][c] + log2f(sum);
        float4* to = reinterpret_cast<float4*>(p_.out_partial + at * kLatentDimV + 128 * warp_ + 16 * g());
#pragma unroll
        for (int u = 0; u < 2; ++u) {
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
  LatentShared& shared_;
  const int request_, first_row_, split_, lane_, warp_;
  int length_;
  KvRange keys_;
  const int32_t* cells_;
  static constexpr int kParts = kInPages ? 1 : 2;
  float score_scale_;
  int page_ahead_[kParts], offset_ahead_[kParts];  // where the tile after that which is loaded next lies
  int page_[kParts], offset_[kParts];              // of keys `lane` and 32 + `lane` of the tile that is loaded next
  const uint8_t *codes_at_ = nullptr, *scales_at_ = nullptr;  // or, kInPages, of its first
  uint32_t good_[2] = {0, 0};                                 // which of its keys there are
  uint2 key_codes_[2][kChunks], value_codes_[kValueRows];
  uint32_t key_scales_[2][kChunks], value_scales_[kValueRows];
  float out_[8][2][4];
  float top_[2][2], sum_[2][2];  // of rows 2 t and 2 t + 1 of eight; sums of this lane's keys
};

template <typename T, bool kInPages>
__global__ void __launch_bounds__(32 * kLatentWarps, 2) fp4_latent_kernel(const __grid_constant__ DecodeParams p) {
  __shared__ LatentShared shared;
  wait_for_earlier_kernels();
  const int blocks = ceil_div(p.seqlen_q * p.num_q_heads, kLatentRows), work = static_cast<int>(blockIdx.x);
  const int block = work % blocks, rest = work / blocks, split = rest % p.num_splits;
  LatentDecode<T, kInPages>(p, shared, rest / p.num_splits, kLatentRows * block, split).run();
  let_next_kernel_start();
}

}  // namespace attnops::fp4_kv
