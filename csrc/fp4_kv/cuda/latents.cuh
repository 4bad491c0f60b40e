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
template <typename T>
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
    cells_ = p.page_table.row(request);
  }

  __device__ void run() {
    const int first = keys_.begin / kLatentKeys;
    const int count = keys_.end > keys_.begin ? (keys_.end + kLatentKeys - 1) / kLatentKeys - first : 0;
    const int begin = first + static_cast<int>(int64_t{count} * split_ / p_.num_splits);
    const int end = first + static_cast<int>(int64_t{count} * (split_ + 1) / p_.num_splits);
    if (begin < end) {
      place(begin);
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

  // Where keys `lane` and 32 + `lane` of a tile lie, and which keys there are. Every warp asks for all.
  __device__ __forceinline__ void place(int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = tile * kLatentKeys + 32 * half + lane_;
      int page = -1, offset = 0;
      if (key >= keys_.begin && key < keys_.end) {
        const int cell = key / p_.page_table.page_size;
        page = __ldg(cells_ + cell);
        offset = key - cell * p_.page_table.page_size;
        if (!p_.page_table.has_page(page)) {
          if (p_.report && warp_ == 0 && first_row_ == 0 && (offset == 0 || key == keys_.begin)) {
            record_fault(p_.report,
                         {kReportFp4Decode, ReportKind::kPageIndex, request_, cell, page, p_.page_table.num_pages});
          }
          page = -1;
        }
      }
      good_[half] = __ballot_sync(~0u, page >= 0);
      page_[half] = page;
      offset_[half] = offset;
    }
  }

  // The rows of key `half` * 32 + `key` of the tile. Without a page: there is no such key.
  __device__ __forceinline__ bool address(int half, int key, const uint8_t*& codes, const uint8_t*& scales) const {
    const int64_t page = __shfl_sync(~0u, page_[half], key), offset = __shfl_sync(~0u, offset_[half], key);
    codes = p_.k.codes + page * p_.k.codes_stride_page + offset * p_.k.codes_stride_token;
    scales = p_.k.scales + page * p_.k.scales_stride_page + offset * p_.k.scales_stride_token;
    return page >= 0;
  }

  // Keys that are not there have scales of zero.
  __device__ __forceinline__ void load_keys() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint8_t *codes, *scales;
      const int key = 16 * (warp_ % 2) + 8 * h + g();
      const bool exists = warp_ < 2 ? address(0, key, codes, scales) : address(1, key, codes, scales);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        key_codes_[h][c] = exists ? __ldg(reinterpret_cast<const uint2*>(codes + 32 * c + 8 * t())) : uint2{0, 0};
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) key_scales_[h][c] = exists ? __ldg(scales + 4 * c + t()) : 0;
    }
  }

  __device__ __forceinline__ void load_values() {
#pragma unroll
    for (int i = 0; i < kValueRows; ++i) {
      const uint8_t *codes, *scales;
      const bool exists = address(i / 8, 16 * (i / 4 % 2) + 2 * t() + 8 * (i / 2 % 2) + i % 2, codes, scales);
      value_codes_[i] = exists ? __ldg(reinterpret_cast<const uint2*>(codes + 64 * warp_ + 8 * g())) : uint2{0, 0};
      value_scales_[i] = exists ? __ldg(scales + 8 * warp_ + g()) : 0;
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

  template <int i>
  __device__ __forceinline__ void multiply_step(int step, uint32_t low, uint32_t high, __half2 scale_low,
                                                __half2 scale_high, float (&scores)[2][4]) const {
    const uint32_t a[4] = {times(code_pair<i>(low), scale_low), times(code_pair<i>(high), scale_high),
                           times(code_pair<i + 1>(low), scale_low), times(code_pair<i + 1>(high), scale_high)};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint2 q = shared_.queries[step][n][lane_];
      mma_m16n8k16<__half>(scores[n], a, q.x, q.y);
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
      multiply_step<0>(4 * c, key_codes_[0][c].x, key_codes_[1][c].x, low, high, scores);
      multiply_step<2>(4 * c + 1, key_codes_[0][c].x, key_codes_[1][c].x, low, high, scores);
      multiply_step<0>(4 * c + 2, key_codes_[0][c].y, key_codes_[1][c].y, low, high, scores);
      multiply_step<2>(4 * c + 3, key_codes_[0][c].y, key_codes_[1][c].y, low, high, scores);
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
    const float scale = p_.softmax_scale * (p_.k.scale ? *p_.k.scale : 1.f) * kUnit, cap = p_.logit_cap;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores[n][i];
        x = cap > 0.f ? cap * tanhf(x * scale / cap) * kLog2e : x * (scale * kLog2e);
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

  // Codes of dims 8 u + i and 8 u + 4 + i of two pairs of keys.
  template <int i>
  __device__ __forceinline__ void multiply_dims(int u, const uint32_t (&low)[2], const uint32_t (&high)[2],
                                                const __half2 (&scales)[2], const uint2 (&probs)[2]) {
    const uint32_t a[4] = {times(code_pair<i>(low[0]), scales[0]), times(code_pair<i>(high[0]), scales[0]),
                           times(code_pair<i>(low[1]), scales[1]), times(code_pair<i>(high[1]), scales[1])};
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_m16n8k16<__half>(out_[4 * u + i][n], a, probs[n].x, probs[n].y);
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
        uint32_t low[2], high[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint2 first = value_codes_[4 * s + 2 * pair], second = value_codes_[4 * s + 2 * pair + 1];
          low[pair] = __byte_perm(u == 0 ? first.x : first.y, u == 0 ? second.x : second.y, 0x5410);
          high[pair] = __byte_perm(u == 0 ? first.x : first.y, u == 0 ? second.x : second.y, 0x7632);
        }
        multiply_dims<0>(u, low, high, scales, probs);
        multiply_dims<1>(u, low, high, scales, probs);
        multiply_dims<2>(u, low, high, scales, probs);
        multiply_dims<3>(u, low, high, scales, probs);
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
  int page_[2] = {-1, -1}, offset_[2] = {0, 0};  // of keys `lane` and 32 + `lane` of the tile that is loaded next
  uint32_t good_[2] = {0, 0};                    // which of its keys there are
  uint2 key_codes_[2][kChunks], value_codes_[kValueRows];
  uint32_t key_scales_[2][kChunks], value_scales_[kValueRows];
  float out_[8][2][4];
  float top_[2][2], sum_[2][2];  // of rows 2 t and 2 t + 1 of eight; sums of this lane's keys
};

template <typename T>
__global__ void __launch_bounds__(32 * kLatentWarps, 2) fp4_latent_kernel(const __grid_constant__ DecodeParams p) {
  __shared__ LatentShared shared;
  wait_for_earlier_kernels();
  const int blocks = ceil_div(p.seqlen_q * p.num_q_heads, kLatentRows), work = static_cast<int>(blockIdx.x);
  const int block = work % blocks, rest = work / blocks, split = rest % p.num_splits;
  LatentDecode<T>(p, shared, rest / p.num_splits, kLatentRows * block, split).run();
  let_next_kernel_start();
}

}  // namespace attnops::fp4_kv
