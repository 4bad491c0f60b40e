#pragma once
#include "device/common/pdl.cuh"
#include "device/sm80/mma.cuh"
#include "fp4_kv/cuda/codes.cuh"
#include "fp4_kv/shapes.h"
#include "scheduler/split_kv.h"

// MLA decode over latents of four bits: rows of 576 values, whose first 512 are V, too. A CTA of four warps has up to
// 16 query rows of a request and a share of its keys, in tiles of 64:
//   scores [16 rows, 16 keys] = q K^T [576, 16 keys], the keys of a tile dealt out to the warps;
//   out [16 rows, 128 dims] += p V [64 keys, 128 dims], the dims dealt out.
// Codes come from memory into the registers of who multiplies them, and become fp16 once: their first 512 go into
// shared memory for the second product. Queries and probabilities lie there, too, as fragments.
namespace attnops::fp4_kv {

// Chunks of values are eight dims, in the order 0, 4, 1, 5, 2, 6, 3, 7, in the places that
// `LatentDecode::place_of_chunk` gives.
struct alignas(1024) LatentShared {
  __half values[kLatentKeys][kLatentDimV];
  uint4 queries[kLatentDim / 16][32];         // of a step, a lane
  uint4 probabilities[kLatentKeys / 16][32];  // of sixteen keys, a lane
  float most[kLatentWarps][kLatentRows];
};

// Lane = 4 g + t. A warp has keys 16 warp + 8 h + g of a tile, of which a lane has dims 128 c + 32 t + 0 .. 31 for c
// below 4, and 512 + 16 t + 0 .. 15. It has query rows g and g + 8, as A and C of both products do.
// kInPages: a tile lies in one page (`tiles_in_pages`), so that it has one address, and rows are on boundaries of 16
// bytes, those of scales of 2. Else each key has its own.
template <typename T, bool kInPages>
class LatentDecode {
 public:
  static constexpr int kChunks = 4, kWords = 18;                  // of 128 dims; of a key in a lane, eight dims each
  static constexpr int kSteps = kLatentDim / 16, kHeldSteps = 8;  // whose queries stay in registers
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
    // Of values: where a lane writes, and where it reads rows of matrices.
    const uint32_t values = smem_address(&shared.values[0][0]);
    write_at_ = values + place_of_chunk(16 * warp_ + g(), 4 * t());
    const int row = lane_ % 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) read_at_[i] = values + place_of_chunk(row, 16 * warp_ + 8 * i + lane_ / 16);
    asm volatile("" : "+r"(write_at_), "+r"(read_at_[0]), "+r"(read_at_[1]));
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
    for (int h = 0; h < 2; ++h) top_[h] = -INFINITY, sum_[h] = 0.f;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[n][i] = 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kHeldSteps; ++i) held_[i] = shared_.queries[i][lane_];
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      float scores[2][4];
      __syncthreads();  // nobody reads the last tile's values any more
      multiply_keys(scores);
      const uint32_t good = own_good();
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

  // In bytes. Both who writes, two keys by four chunks at a time, and who reads eight keys, meets all banks.
  __device__ __forceinline__ static uint32_t place_of_chunk(int key, int chunk) {
    return key * 2 * kLatentDimV + 16 * (chunk / 8 * 8 + (chunk % 8 ^ (key + chunk / 8 * 2) % 8));
  }

  // Which of the warp's keys there are.
  __device__ __forceinline__ uint32_t own_good() const {
    return (warp_ < 2 ? good_[0] : good_[1]) >> (16 * (warp_ % 2)) & 0xffff;
  }

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
      const auto place_of = [&](int64_t stride_page, int64_t stride_token) {  // of 31 bits
        return int64_t{page_[0]} * static_cast<int>(stride_page) + int64_t{offset_[0]} * static_cast<int>(stride_token);
      };
      codes_at_ = p_.k.codes + place_of(p_.k.codes_stride_page, p_.k.codes_stride_token);
      scales_at_ = p_.k.scales + place_of(p_.k.scales_stride_page, p_.k.scales_stride_token);
    }
  }

  // Scores of keys that are not there are hidden later, and as values they are zeros: what lies in their place may be
  // NaN.
  __device__ __forceinline__ void load_keys() {
    const uint32_t good = own_good();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = 16 * (warp_ % 2) + 8 * h + g();  // of a half of the tile
      const uint8_t *codes, *scales;
      if constexpr (kInPages) {
        const int row = 32 * (warp_ / 2) + key;
        codes = codes_at_ + row * static_cast<int>(p_.k.codes_stride_token);
        scales = scales_at_ + row * static_cast<int>(p_.k.scales_stride_token);
      } else {
        const int64_t page = __shfl_sync(~0u, warp_ < 2 ? page_[0] : page_[kParts - 1], key);
        const int64_t offset = __shfl_sync(~0u, warp_ < 2 ? offset_[0] : offset_[kParts - 1], key);
        codes = p_.k.codes + page * p_.k.codes_stride_page + offset * p_.k.codes_stride_token;
        scales = p_.k.scales + page * p_.k.scales_stride_page + offset * p_.k.scales_stride_token;
      }
      const auto two = [](const uint8_t* from) { return __ldcs(reinterpret_cast<const uint2*>(from)); };
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint8_t *from = codes + 64 * c + 16 * t(), *scale = scales + 8 * c + 2 * t();
        uint32_t* to = codes_[h] + 4 * c;
        if constexpr (kInPages) {
          const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from));
          to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
          scales_[h][c] = __ldg(reinterpret_cast<const uint16_t*>(scale));
        } else {
          const uint2 x = two(from), y = two(from + 8);
          to[0] = x.x, to[1] = x.y, to[2] = y.x, to[3] = y.y;
          scales_[h][c] = __ldg(scale) | __ldg(scale + 1) << 8;
        }
      }
      const uint2 x = two(codes + 256 + 8 * t());
      codes_[h][16] = x.x, codes_[h][17] = x.y;
      scales_[h][kChunks] = __ldg(scales + 32 + t());
    }
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
  __device__ __forceinline__ void load_queries() {
    const float sign = score_scale_ < 0.f ? -1.f : 1.f;  // scores are to be multiplied by what is not below 0
    for (int i = threadIdx.x; i < kSteps * 32; i += 32 * kLatentWarps) {
      const int lane = i % 32, step = i / 32;
      uint32_t pairs[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row_ + 8 * h + lane / 4, token = row / p_.num_q_heads,
                  head = row - token * p_.num_q_heads;
        const T* q = static_cast<const T*>(p_.q) + request_ * p_.q_stride_request + token * p_.q_stride_token +
                     head * p_.q_stride_head + dim_of(step / 2, lane % 4) + 2 * (step % 2);
        const auto at = [&](int d) { return row < rows() ? sign * static_cast<float>(q[d]) : 0.f; };
        pairs[h][0] = pack2<__half>(at(0), at(4)), pairs[h][1] = pack2<__half>(at(1), at(5));
      }
      shared_.queries[step][lane] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
    }
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[2][4]) {
    float parts[2][2][4];  // words by turns, so that chains are short
#pragma unroll
    for (int i = 0; i < 16; ++i) parts[i / 8][i / 4 % 2][i % 4] = 0.f;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t pairs[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const __half2 blocks = scale_pair(scales_[h][word / 4]);
        const __half2 scale = word / 2 % 2 == 0 || word >= 16 ? __low2half2(blocks) : __high2half2(blocks);
        code_pairs(codes_[h][word], pairs[h]);
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[h][i] = times(pairs[h][i], scale);
        if (word < 16) {
          const int c = word / 4;
          const uint32_t at = (write_at_ ^ 16 * (word % 4 ^ 4 * (c % 2))) + 256 * c + 8 * h * 2 * kLatentDimV;
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(at), "r"(pairs[h][0]), "r"(pairs[h][1]),
                       "r"(pairs[h][2]), "r"(pairs[h][3])
                       : "memory");
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * word + half;
        const uint4 q = step < kHeldSteps ? held_[step] : shared_.queries[step][lane_];
        const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          mma_m16n8k16<__half>(parts[word % 2][h], a, pairs[h][2 * half], pairs[h][2 * half + 1]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[h][i] = parts[0][h][i] + parts[1][h][i];
    }
  }

  // Hides what rows do not see. `good`: which of the warp's keys there are.
  __device__ __forceinline__ void mask(int tile, uint32_t good, float (&scores)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row_ + 8 * r + g(), token = min_of(row / p_.num_q_heads, p_.seqlen_q - 1);
      const int position = length_ - p_.seqlen_q + token;
      const int begin = p_.window_left < 0 ? 0 : position - p_.window_left;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int own = 8 * h + 2 * t() + c, key = tile * kLatentKeys + 16 * warp_ + own;
          if (key < begin || key > position || !(good >> own & 1)) scores[h][2 * r + c] = -INFINITY;
        }
      }
    }
  }

  // Scores become probabilities, in shared memory. All warps have the same references.
  __device__ __forceinline__ void soften(int tile, uint32_t good, float (&scores)[2][4]) {
    // A score in units of log2 is its product with a factor. Caps, and factors that leave nothing of -inf, come first.
    float factor = fabsf(score_scale_) * kLog2e;
    if (p_.logit_cap > 0.f || !(factor > 1e-30f)) {
      const float before = p_.logit_cap > 0.f ? __fdividef(fabsf(score_scale_), p_.logit_cap) : factor;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (float& x : scores[h]) {
          x *= before;
          if (p_.logit_cap > 0.f) x = p_.logit_cap * kLog2e * tanhf(x);
        }
      }
      factor = 1.f;
    }
    const int all_begin = p_.window_left < 0 ? 0 : length_ - 1 - p_.window_left;
    const int first = tile * kLatentKeys + 16 * warp_;
    if (good != 0xffff || first < all_begin || first + 16 > length_ - p_.seqlen_q + 1) mask(tile, good, scores);
    bool above = false;
    float most[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] =
          factor * fmaxf(fmaxf(scores[0][2 * r], scores[0][2 * r + 1]), fmaxf(scores[1][2 * r], scores[1][2 * r + 1]));
      above |= most[r] > top_[r] + kSlack;  // false for -inf above -inf
    }
    if (__syncthreads_or(above)) move_references(most);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float reference = top_[r] == -INFINITY ? 0.f : top_[r];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = scores[h][2 * r + c];
          x = exp2_approx(fmaf(x, factor, -reference));
          sum_[r] += x;
        }
      }
    }
    shared_.probabilities[warp_][lane_] = {
        pack2<__half>(scores[0][0], scores[0][1]), pack2<__half>(scores[0][2], scores[0][3]),
        pack2<__half>(scores[1][0], scores[1][1]), pack2<__half>(scores[1][2], scores[1][3])};
  }

  __device__ __forceinline__ void move_references(const float (&most)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float own = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
      own = fmaxf(own, __shfl_xor_sync(~0u, own, 2));
      if (t() == 0) shared_.most[warp_][8 * r + g()] = own;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float next = top_[r];
#pragma unroll
      for (int warp = 0; warp < kLatentWarps; ++warp) next = fmaxf(next, shared_.most[warp][8 * r + g()]);
      const float shrink = next == -INFINITY ? 1.f : exp2_approx(top_[r] - next);
      top_[r] = next, sum_[r] *= shrink;
#pragma unroll
      for (int n = 0; n < 16; ++n) out_[n][2 * r] *= shrink, out_[n][2 * r + 1] *= shrink;
    }
  }

  __device__ __forceinline__ void multiply_values() {
#pragma unroll
    for (int s = 0; s < kLatentKeys / 16; ++s) {
      const uint4 p = shared_.probabilities[s][lane_];
      const uint32_t a[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
      for (int n = 0; n < 16; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, (read_at_[n / 8] ^ 16 * (n % 8)) + 16 * s * 2 * kLatentDimV);
        mma_m16n8k16<__half>(out_[n], a, b[0], b[1]);
        mma_m16n8k16<__half>(out_[n + 1], a, b[2], b[3]);
      }
    }
  }

  // The share's result, divided by its sum; -inf where it has no key.
  __device__ __forceinline__ void store() {
    const float v_scale = (p_.k.scale ? *p_.k.scale : 1.f) * kUnit;
    __syncthreads();  // nobody reads the last references any more
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float own = sum_[r] + __shfl_xor_sync(~0u, sum_[r], 1);
      own += __shfl_xor_sync(~0u, own, 2);
      if (t() == 0) shared_.most[warp_][8 * r + g()] = own;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.f;
#pragma unroll
      for (int warp = 0; warp < kLatentWarps; ++warp) sum += shared_.most[warp][8 * r + g()];
      const int row = first_row_ + 8 * r + g();
      if (row >= rows()) continue;
      const int64_t at = (int64_t{split_} * p_.batch_size + request_) * rows() + row;
      const bool empty = sum == 0.f;
      const float factor = empty ? 0.f : v_scale / sum;
      if (t() == 0 && warp_ == 0) p_.lse_partial[at] = empty ? -INFINITY : top_[r] + log2f(sum);
      float* to = p_.out_partial + at * kLatentDimV + 128 * warp_ + t();
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) to[8 * n + 4 * c] = empty ? 0.f : out_[n][2 * r + c] * factor;
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
  uint32_t write_at_, read_at_[2];
  int page_ahead_[kParts], offset_ahead_[kParts];  // where the tile after that which is loaded next lies
  int page_[kParts], offset_[kParts];              // of keys `lane` and 32 + `lane` of the tile that is loaded next
  const uint8_t *codes_at_ = nullptr, *scales_at_ = nullptr;  // or, kInPages, of its first
  uint32_t good_[2] = {0, 0};                                 // which of its keys there are
  uint32_t codes_[2][kWords], scales_[2][kChunks + 1];
  uint4 held_[kHeldSteps];
  float out_[16][4];
  float top_[2], sum_[2];  // of rows g and g + 8; sums of this lane's keys
};

template <typename T, bool kInPages>
__global__ void __launch_bounds__(32 * kLatentWarps, 2) fp4_latent_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) uint8_t fp4_shared_memory[];
  auto& shared = *reinterpret_cast<LatentShared*>(fp4_shared_memory);
  wait_for_earlier_kernels();
  const int blocks = ceil_div(p.seqlen_q * p.num_q_heads, kLatentRows), work = static_cast<int>(blockIdx.x);
  const int block = work % blocks, rest = work / blocks, split = rest % p.num_splits;
  LatentDecode<T, kInPages>(p, shared, rest / p.num_splits, kLatentRows * block, split).run();
  let_next_kernel_start();
}

}  // namespace attnops::fp4_kv
