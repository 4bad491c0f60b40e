#pragma once
#include "device/common/pdl.cuh"
#include "device/sm80/mma.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma_rows_registers.cuh"
#include "fp4_kv/cuda/codes.cuh"
#include "fp4_kv/shapes.h"
#include "scheduler/split_kv.h"

// MLA decode on Hopper over latents of four bits: rows of 576 values, whose first 512 are V, too. A CTA is a warpgroup
// that has up to 16 query rows of a request and a share of its keys, in tiles of 64. Both products are transposed:
//   scores^T [64 keys, 16 rows] = K q^T, out^T [512 dims, 16 rows] += V^T p^T.
// Codes come from memory into the registers of who multiplies them, and become fp16 once. There they are an operand of
// the first product as they are; their first 512 go into shared memory for the second.
namespace attnops::fp4_kv::sm90 {

namespace hopper = attnops::sm90;

inline constexpr int kBlocksV = kLatentDimV / 64;

// Dims of blocks and of steps are in orders that suit the lanes: see `LatentDecode`.
struct alignas(1024) LatentShared {
  uint8_t values[kBlocksV][hopper::kTileBytes];  // [64 keys][64 dims], swizzled
  __half queries[2][kLatentDim][8];              // by eight rows: of a dim, a row
  __half probabilities[2][kLatentKeys][8];       // of a key, a row
  float exchange[kLatentWarps][kLatentRows];
};

// Lane = 4 g + t of warp w. Of a tile a lane has keys 16 w + g + 8 h, of each dims 128 c + 32 t + 0 .. 31 for c below
// 4, and 512 + 16 t + 0 .. 15, eight dims a word. Scores and results are in the lanes of wgmma:
//   scores[4 n + 2 h + i]: key 16 w + g + 8 h, row 8 n + 2 t + i;
//   out[b][4 n + 2 h + i]: dim `dim_of_result(b)` + h, the same row.
// A tile lies in one page (`tiles_in_pages`), so that it has one address.
template <typename T>
class LatentDecode {
 public:
  static constexpr int kChunks = 4, kWords = 18;  // of 128 dims; of a key in a lane, eight dims each
  static constexpr int kInFlight = 3;             // words whose products are not over
  static constexpr float kSlack = 8.f;            // a reference moves when a score exceeds it by so many powers of two

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
    write_at_ = hopper::smem_address(shared.values) + hopper::swizzled(16 * warp_ + lane_ % 16, lane_ / 16);
    asm volatile("" : "+r"(write_at_));
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
      for (int i = 0; i < 2; ++i) top_[n][i] = -INFINITY, sum_[n][i] = 0.f;
    }
#pragma unroll
    for (int b = 0; b < kBlocksV; ++b) {
#pragma unroll
      for (float& x : out_[b]) x = 0.f;
    }
    hopper::fence_async_proxy();
    __syncthreads();
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      float scores[8];
      multiply_keys(scores);
      const uint32_t good = own_good();
      if (tile + 1 < end) {
        place(tile + 1);
        look_up(tile + 2, end);
        load_keys();
      }
      hopper::wgmma_wait<0>(scores);
      soften(tile, good, scores);
      multiply_values();
      __syncthreads();  // nobody reads the tile's values any more
    }
    store();
  }

 private:
  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int t() const { return lane_ % 4; }
  __device__ __forceinline__ int rows() const { return p_.seqlen_q * p_.num_q_heads; }

  // Which of the warp's keys there are.
  __device__ __forceinline__ uint32_t own_good() const {
    return (warp_ < 2 ? good_[0] : good_[1]) >> (16 * (warp_ % 2)) & 0xffff;
  }

  // Asks for a tile's page, a tile before its place is wanted.
  __device__ __forceinline__ void look_up(int tile, int end) {
    if (tile >= end) return;
    const int key = tile * kLatentKeys, cell = key / p_.page_table.page_size;
    offset_ahead_ = key - cell * p_.page_table.page_size;
    page_ahead_ = key < keys_.end ? __ldg(cells_ + cell) : -1;
  }

  // Where the tile's keys lie, and which of them there are.
  __device__ __forceinline__ void place(int tile) {
    const bool has_page = p_.page_table.has_page(page_ahead_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = tile * kLatentKeys + 32 * half + lane_;
      const bool wanted = key >= keys_.begin && key < keys_.end;
      if (p_.report && wanted && !has_page && warp_ == 0 && first_row_ == 0) {
        const int cell = key / p_.page_table.page_size;
        if (key == cell * p_.page_table.page_size || key == keys_.begin) {
          record_fault(p_.report, {kReportFp4Decode, ReportKind::kPageIndex, request_, cell, page_ahead_,
                                   p_.page_table.num_pages});
        }
      }
      good_[half] = __ballot_sync(~0u, wanted && has_page);
    }
    const int page = has_page ? page_ahead_ : 0, row = offset_ahead_ + 16 * warp_ + g();
    const auto place_of = [&](int64_t stride_page, int64_t stride_token) {  // of 31 bits
      return int64_t{page} * static_cast<int>(stride_page) + int64_t{row} * static_cast<int>(stride_token);
    };
    codes_at_ = p_.k.codes + place_of(p_.k.codes_stride_page, p_.k.codes_stride_token);
    scales_at_ = p_.k.scales + place_of(p_.k.scales_stride_page, p_.k.scales_stride_token);
  }

  // Scores of keys that are not there are hidden later, and as values they are zeros: what lies in their place may be
  // NaN.
  __device__ __forceinline__ void load_keys() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint8_t* const codes = codes_at_ + 8 * h * static_cast<int>(p_.k.codes_stride_token);
      const uint8_t* const scales = scales_at_ + 8 * h * static_cast<int>(p_.k.scales_stride_token);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(codes + 64 * c + 16 * t()));
        uint32_t* const to = codes_[h] + 4 * c;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        scales_[h][c] = __ldg(reinterpret_cast<const uint16_t*>(scales + 8 * c + 2 * t()));
      }
      const uint2 x = __ldcs(reinterpret_cast<const uint2*>(codes + 256 + 8 * t()));
      codes_[h][16] = x.x, codes_[h][17] = x.y;
      scales_[h][kChunks] = __ldg(scales + 32 + t());
    }
    const uint32_t good = own_good();
    if (good == 0xffff) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int c = 0; c <= kChunks; ++c) {
        if (!(good >> (8 * h + g()) & 1)) scales_[h][c] = 0;
      }
    }
  }

  // The first of the eight dims of a word of a lane.
  __device__ __forceinline__ static int dim_of(int word, int t) {
    return word < 16 ? 128 * (word / 4) + 32 * t + 8 * (word % 4) : kLatentDimV + 16 * t + 8 * (word - 16);
  }

  // Row r of the CTA is row first_row + r of the request's: token row / heads, head row % heads. Others are zeros.
  // A word is two steps of sixteen dims: dims 2 s + 0, 4 stand where t's first two k belong, 2 s + 1, 5 at its others.
  __device__ __forceinline__ void load_queries() {
    constexpr int kLoads = kLatentDim / 8 * kLatentRows / (32 * kLatentWarps);
    const int r = threadIdx.x % kLatentRows, first = threadIdx.x / kLatentRows;
    const int row = first_row_ + r, token = row / p_.num_q_heads, head = row - token * p_.num_q_heads;
    const T* const q = static_cast<const T*>(p_.q) + request_ * p_.q_stride_request + token * p_.q_stride_token +
                       head * p_.q_stride_head;
    const float sign = score_scale_ < 0.f ? -1.f : 1.f;  // scores are to be multiplied by what is not below 0
    uint4 loads[kLoads];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const int chunk = first + 8 * l;
      loads[l] = row < rows() ? __ldg(reinterpret_cast<const uint4*>(q + dim_of(chunk / 4, chunk % 4)))
                              : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const int chunk = first + 8 * l, word = chunk / 4, t = chunk % 4;
      T values[8];
      memcpy(values, &loads[l], sizeof(values));
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        const int k = 2 * t + d / 4 + d % 2 * 8;
        shared_.queries[r / 8][32 * word + 16 * (d % 4 / 2) + k][r % 8] = __half(sign * static_cast<float>(values[d]));
      }
    }
  }

  // scores = keys x queries, in flight; and values to shared memory.
  __device__ __forceinline__ void multiply_keys(float (&scores)[8]) {
    const Operand queries(hopper::plain_descriptor(hopper::smem_address(shared_.queries), kLatentDim * 16));
    uint32_t keys[kInFlight][2][4];
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      auto& now = keys[word % kInFlight];
      if (word >= kInFlight) hopper::wgmma_wait<kInFlight - 1>();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const __half2 blocks = scale_pair(scales_[h][word / 4]);
        const __half2 scale = word / 2 % 2 == 0 || word >= 16 ? __low2half2(blocks) : __high2half2(blocks);
        uint32_t pairs[4];
        code_pairs(codes_[h][word], pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) now[i / 2][h + i % 2 * 2] = times(pairs[i], scale);
      }
      hopper::wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * word + half;
        if (word < 16) {
          hopper::store_fragment(now[half], (write_at_ ^ 32 * (step % 4)) + step / 4 * hopper::kTileBytes);
        }
        hopper::wgmma_rows<1>(scores, now[half], queries.at(step * hopper::kStepPlain), step > 0);
      }
      hopper::wgmma_commit();
    }
  }

  // Hides what rows do not see. `good`: which of the warp's keys there are.
  __device__ __forceinline__ void mask(int tile, uint32_t good, float (&scores)[8]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row_ + 8 * n + 2 * t() + i, token = min_of(row / p_.num_q_heads, p_.seqlen_q - 1);
        const int position = length_ - p_.seqlen_q + token;
        const int begin = p_.window_left < 0 ? 0 : position - p_.window_left;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int own = 8 * h + g(), key = tile * kLatentKeys + 16 * warp_ + own;
          if (key < begin || key > position || !(good >> own & 1)) scores[4 * n + 2 * h + i] = -INFINITY;
        }
      }
    }
  }

  // Scores become probabilities, in shared memory, visible to the matrix units as the tile's values are. The old
  // references are tried first: the barrier that shows the probabilities tells whether some row must move its own.
  __device__ __forceinline__ void soften(int tile, uint32_t good, float (&scores)[8]) {
    // A score in units of log2 is its product with a factor. Caps, and factors that leave nothing of -inf, come first.
    float factor = fabsf(score_scale_) * kLog2e;
    if (p_.logit_cap > 0.f || !(factor > 1e-30f)) {
      const float before = p_.logit_cap > 0.f ? __fdividef(fabsf(score_scale_), p_.logit_cap) : factor;
#pragma unroll
      for (float& x : scores) {
        x *= before;
        if (p_.logit_cap > 0.f) x = p_.logit_cap * kLog2e * tanhf(x);
      }
      factor = 1.f;
    }
    const int all_begin = p_.window_left < 0 ? 0 : length_ - 1 - p_.window_left;
    const int first = tile * kLatentKeys + 16 * warp_;
    if (good != 0xffff || first < all_begin || first + 16 > length_ - p_.seqlen_q + 1) mask(tile, good, scores);
    bool above = false;
    float most[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        most[n][i] = factor * fmaxf(scores[4 * n + i], scores[4 * n + 2 + i]);
        above |= most[n][i] > top_[n][i] + kSlack;  // false for -inf above -inf
      }
    }
    float added[2][2];
    write_probabilities(scores, factor, added);
    hopper::fence_async_proxy();
    if (__syncthreads_or(above)) {
      move_references(most);
      write_probabilities(scores, factor, added);
      hopper::fence_async_proxy();
      __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum_[n][i] += added[n][i];
    }
  }

  __device__ __forceinline__ void write_probabilities(const float (&scores)[8], float factor, float (&added)[2][2]) {
    const uint32_t to = hopper::smem_address(shared_.probabilities) + (16 * warp_ + g()) * 16 + t() * 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float top = top_[n][k % 2];
        x[k] = exp2_approx(fmaf(scores[4 * n + k], factor, top == -INFINITY ? 0.f : -top));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to + n * kLatentKeys * 16 + h * 8 * 16),
                     "r"(hopper::pack_pair<__half>(x[2 * h], x[2 * h + 1]))
                     : "memory");
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) added[n][i] = x[i] + x[2 + i];
    }
  }

  // All warps have the same references.
  __device__ __forceinline__ void move_references(const float (&most)[2][2]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float own = most[n][i];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) own = fmaxf(own, __shfl_xor_sync(~0u, own, lanes));
        if (g() == 0) shared_.exchange[warp_][8 * n + 2 * t() + i] = own;
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float next = top_[n][i];
#pragma unroll
        for (int warp = 0; warp < kLatentWarps; ++warp) {
          next = fmaxf(next, shared_.exchange[warp][8 * n + 2 * t() + i]);
        }
        const float shrink = next == -INFINITY ? 1.f : exp2_approx(top_[n][i] - next);
        top_[n][i] = next, sum_[n][i] *= shrink;
#pragma unroll
        for (int b = 0; b < kBlocksV; ++b) out_[b][4 * n + i] *= shrink, out_[b][4 * n + 2 + i] *= shrink;
      }
    }
  }

  __device__ __forceinline__ void multiply_values() {
    const Operand values(hopper::operand_descriptor(hopper::smem_address(shared_.values)));
    const Operand probabilities(
        hopper::plain_descriptor(hopper::smem_address(shared_.probabilities), kLatentKeys * 16));
#pragma unroll
    for (int b = 0; b < kBlocksV; ++b) hopper::pin(out_[b]);
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kLatentKeys / 16; ++k) {  // sums of blocks by turns
#pragma unroll
      for (int b = 0; b < kBlocksV; ++b) {
        hopper::wgmma_rows<__half, 1, 1>(out_[b], values.at(b * (hopper::kTileBytes >> 4) + k * hopper::kStepMnMajor),
                                         probabilities.at(k * hopper::kStepPlain), 1);
      }
    }
    hopper::wgmma_commit();
    hopper::wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < kBlocksV; ++b) hopper::pin(out_[b]);
  }

  // A step of the first product is two chunks of a row of values, of two dims of each t: chunks 2 w + h of block b are
  // step 4 b + w.
  __device__ __forceinline__ int dim_of_result(int b) const {
    return dim_of(2 * b + warp_ / 2, g() / 2) + 2 * (warp_ % 2) + 4 * (g() % 2);
  }

  // The share's result, divided by its sum; -inf where it has no key.
  __device__ __forceinline__ void store() {
    const float v_scale = (p_.k.scale ? *p_.k.scale : 1.f) * kUnit;
    __syncthreads();  // nobody reads the last references any more
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float own = sum_[n][i];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) own += __shfl_xor_sync(~0u, own, lanes);
        if (g() == 0) shared_.exchange[warp_][8 * n + 2 * t() + i] = own;
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own_row = 8 * n + 2 * t() + i, row = first_row_ + own_row;
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < kLatentWarps; ++warp) sum += shared_.exchange[warp][own_row];
        if (row >= rows()) continue;
        const int64_t at = (int64_t{split_} * p_.batch_size + request_) * rows() + row;
        const bool empty = sum == 0.f;
        const float factor = empty ? 0.f : v_scale / sum;
        if (g() == 0 && warp_ == 0) p_.lse_partial[at] = empty ? -INFINITY : top_[n][i] + log2f(sum);
        float* const to = p_.out_partial + at * kLatentDimV;
#pragma unroll
        for (int b = 0; b < kBlocksV; ++b) {
          const auto value = [&](int h) { return empty ? 0.f : out_[b][4 * n + 2 * h + i] * factor; };
          *reinterpret_cast<float2*>(to + dim_of_result(b)) = make_float2(value(0), value(1));
        }
      }
    }
  }

  // A descriptor, the same in all lanes: steps are counted in uniform registers.
  struct Operand {
    uint32_t low, high;

    __device__ __forceinline__ explicit Operand(uint64_t whole)
        : low(__shfl_sync(~0u, static_cast<uint32_t>(whole), 0)), high(static_cast<uint32_t>(whole >> 32)) {}
    __device__ __forceinline__ uint64_t at(int steps) const {
      uint64_t whole;
      asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low + steps), "r"(high));
      return whole;
    }
  };

  const DecodeParams& p_;
  LatentShared& shared_;
  const int request_, first_row_, split_, lane_, warp_;
  int length_;
  KvRange keys_;
  const int32_t* cells_;
  float score_scale_;
  uint32_t write_at_;                       // of values
  int page_ahead_ = -1, offset_ahead_ = 0;  // where the tile after that which is loaded next lies
  const uint8_t *codes_at_, *scales_at_;    // of the lane's first key of the tile that is loaded next
  uint32_t good_[2] = {0, 0};               // which of its keys there are
  uint32_t codes_[2][kWords], scales_[2][kChunks + 1];
  float out_[kBlocksV][8];
  float top_[2][2], sum_[2][2];  // of rows 8 n + 2 t + i; sums of this lane's keys
};

template <typename T>
__global__ void __launch_bounds__(32 * kLatentWarps, 2) fp4_latent_sm90_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) uint8_t fp4_shared_memory[];
  auto& shared = *reinterpret_cast<LatentShared*>(fp4_shared_memory);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int blocks = ceil_div(p.seqlen_q * p.num_q_heads, kLatentRows), work = static_cast<int>(blockIdx.x);
  const int block = work % blocks, rest = work / blocks, split = rest % p.num_splits;
  LatentDecode<T>(p, shared, rest / p.num_splits, kLatentRows * block, split).run();
}

}  // namespace attnops::fp4_kv::sm90
