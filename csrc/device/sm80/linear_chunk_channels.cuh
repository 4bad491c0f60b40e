#pragma once
#include "device/sm80/linear_chunk_local.cuh"

// The part of a chunk that no state is needed for, where each channel of the keys has a gate of its own (section 3 of
// arXiv 2510.26692). The decay then stands inside the sums over channels. Between blocks of 16 tokens it is split at
// the first token of the later block, so that both parts are at most 1; within a block it is made for each pair.
namespace attnops {

template <int kKeys>
struct ChannelsShared {
  static constexpr int kPanels = kKeys / 64, kStride = 68, kSumStride = kKeys + 4;
  alignas(1024) unsigned char k[kPanels * kPanelBytes];
  unsigned char q[kPanels * kPanelBytes];
  unsigned char p[kPanelBytes];
  float l[kChunk][kStride];
  float x[32][36];
  float sums[kChunk][kSumStride];  // of log-decays
  float coefficient[kChunk], key_scale[kChunk], query_scale[kChunk];
};

// The same as `log_decay`, by fast functions: what bf16 does not tell apart.
__device__ __forceinline__ float fast_log_decay(float a, bool has_a_log, float rate, float bias, float lower_bound) {
  if (!has_a_log) return a;
  const float x = a + bias;
  if (lower_bound < 0.f) return __fdividef(lower_bound, 1.f + __expf(-rate * x));
  return -rate * (fmaxf(x, 0.f) + __logf(1.f + __expf(-fabsf(x))));
}

// Running sums of the log-decays, a channel a thread.
template <int kKeys>
__device__ __forceinline__ void sum_channels(const LinearStep& p, const ChunkPlace& chunk, int head,
                                             ChannelsShared<kKeys>& s) {
  constexpr int kAhead = 8;
  const bool logits = p.a_log != nullptr;
  const float rate = logits ? expf(p.a_log[head]) : 0.f;
  for (int c = threadIdx.x; c < kKeys; c += kLocalThreads) {
    const bool inside = c < p.key_dim;
    const float bias = p.dt_bias != nullptr && inside ? p.dt_bias[int64_t{head} * p.key_dim + c] : 0.f;
    float sum = 0.f;
    for (int t = 0; t < kChunk; t += kAhead) {
      float gates[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool real = inside && t + i < chunk.count;
        gates[i] = real ? load_row(p.gate_dtype, p.a, chunk.begin + t + i, head, c) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool real = inside && t + i < chunk.count;
        if (real) sum += fmaxf(fast_log_decay(gates[i], logits, rate, bias, p.lower_bound), kLeastLogDecay);
        s.sums[t + i][c] = sum;
      }
    }
  }
}

// Two bf16 in a word, times two floats.
__device__ __forceinline__ uint32_t scale_pair(uint32_t word, float low, float high) {
  return pack2<__nv_bfloat16>(__uint_as_float(word << 16) * low, __uint_as_float(word & 0xffff0000u) * high);
}

// Products of block (row, column) of 16 tokens each, row > column, by one warp: of keys and of queries with keys,
// columns 0 to 7 and 8 to 15.
template <int kKeys>
__device__ __forceinline__ void multiply_far(const ChannelsShared<kKeys>& s, int row, int column, float (&kk)[2][4],
                                             float (&qk)[2][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t keys = smem_address(s.k), queries = smem_address(s.q);
  const float* anchor = s.sums[16 * row - 1];
#pragma unroll 2
  for (int i = 0; i < kKeys / 16; ++i) {
    uint32_t a_keys[4], a_queries[4], b[4];
    load_a(a_keys, keys + i / 4 * kPanelBytes, 16 * row, i % 4);
    load_a(a_queries, queries + i / 4 * kPanelBytes, 16 * row, i % 4);
    load_b(b, keys + i / 4 * kPanelBytes, 16 * column, i % 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto sums_at = [&](int token, int half) {
        return *reinterpret_cast<const float2*>(&s.sums[token][16 * i + 8 * half + 2 * t]);
      };
      const float2 from = *reinterpret_cast<const float2*>(anchor + 16 * i + 8 * (j / 2) + 2 * t);
      const float2 of_row = sums_at(16 * row + g + j % 2 * 8, j / 2);
      const float low = __expf(of_row.x - from.x), high = __expf(of_row.y - from.y);
      a_keys[j] = scale_pair(a_keys[j], low, high);
      a_queries[j] = scale_pair(a_queries[j], low, high);
      const float2 anchor_b = *reinterpret_cast<const float2*>(anchor + 16 * i + 8 * (j % 2) + 2 * t);
      const float2 of_column = sums_at(16 * column + g + j / 2 * 8, j % 2);
      b[j] = scale_pair(b[j], __expf(anchor_b.x - of_column.x), __expf(anchor_b.y - of_column.y));
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_m16n8k16<__nv_bfloat16>(kk[n], a_keys, b[2 * n], b[2 * n + 1]);
      mma_m16n8k16<__nv_bfloat16>(qk[n], a_queries, b[2 * n], b[2 * n + 1]);
    }
  }
}

// Lane i has the sum over all lanes of x[i].
template <int kHalf = 16>
__device__ __forceinline__ float sum_across(float (&x)[32]) {
  const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = upper ? x[i + kHalf] : x[i], sent = upper ? x[i] : x[i + kHalf];
    x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kHalf);
  }
  if constexpr (kHalf > 1) return sum_across<kHalf / 2>(x);
  return x[0];
}

// kEach neighbouring channels of a token from panels.
template <int kEach>
__device__ __forceinline__ void load_channels(float (&x)[kEach], const unsigned char* panels, int token, int first) {
#pragma unroll
  for (int i = 0; i < kEach; i += 2) {
    const int c = first + i;
    const uint32_t word =
        *reinterpret_cast<const uint32_t*>(panels + c / 64 * kPanelBytes + panel_at(token, c % 64 / 8) + c % 8 * 2);
    x[i] = __uint_as_float(word << 16);
    x[i + 1] = __uint_as_float(word & 0xffff0000u);
  }
}

// The products within block `block`, by one warp: lanes have channels, a row at a time.
template <int kKeys>
__device__ __forceinline__ void multiply_near(ChannelsShared<kKeys>& s, int block) {
  constexpr int kEach = kKeys / 32;
  const int lane = threadIdx.x % 32, first = lane * kEach;
  const auto load_sums = [&](float(&x)[kEach], int token) {
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(&s.sums[token][first + i]);
      x[i] = pair.x * kLog2e, x[i + 1] = pair.y * kLog2e;
    }
  };
  for (int i = 0; i < 16; ++i) {
    const int row = 16 * block + i;
    float sums[kEach], keys[kEach], queries[kEach], products[32];
    load_sums(sums, row);
    load_channels(keys, s.k, row, first);
    load_channels(queries, s.q, row, first);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      products[j] = products[16 + j] = 0.f;
      if (j > i) continue;
      float others[kEach], other_keys[kEach];
      load_sums(others, 16 * block + j);
      load_channels(other_keys, s.k, 16 * block + j, first);
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        const float scaled = other_keys[c] * exp2_approx(sums[c] - others[c]);
        products[j] = fmaf(keys[c], scaled, products[j]);
        products[16 + j] = fmaf(queries[c], scaled, products[16 + j]);
      }
    }
    const float product = sum_across(products);
    const int j = lane % 16, column = 16 * block + j;
    if (lane < 16) {
      if (j < i) s.l[row][column] = s.coefficient[row] * s.key_scale[row] * s.key_scale[column] * product;
    } else {
      const float p = j <= i ? s.query_scale[row] * s.key_scale[column] * product : 0.f;
      *reinterpret_cast<__nv_bfloat16*>(s.p + panel_at(row, column / 8) + column % 8 * 2) = __float2bfloat16(p);
    }
  }
}

// Keys and queries under the decay since the chunk's begin, and keys under that to its end, as panels.
template <int kKeys>
__device__ __forceinline__ void store_decayed(const ChannelsShared<kKeys>& s, unsigned char* to) {
  constexpr int kPanels = kKeys / 64;
  for (int i = threadIdx.x; i < kPanels * kChunk * 8; i += kLocalThreads) {
    const int panel = i / (kChunk * 8), row = i / 8 % kChunk, chunk = i % 8;
    const uint32_t at = panel * kPanelBytes + panel_at(row, chunk);
    const uint4 keys = *reinterpret_cast<const uint4*>(s.k + at), queries = *reinterpret_cast<const uint4*>(s.q + at);
    const uint32_t key_words[4] = {keys.x, keys.y, keys.z, keys.w};
    const uint32_t query_words[4] = {queries.x, queries.y, queries.z, queries.w};
    uint32_t begun[4], asked[4], ended[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = 64 * panel + 8 * chunk + 2 * j;
      const float low = s.sums[row][c], high = s.sums[row][c + 1];
      const float decay_low = __expf(low), decay_high = __expf(high), of_key = s.key_scale[row];
      begun[j] = scale_pair(key_words[j], of_key * decay_low, of_key * decay_high);
      asked[j] = scale_pair(query_words[j], s.query_scale[row] * decay_low, s.query_scale[row] * decay_high);
      ended[j] = scale_pair(key_words[j], of_key * __expf(s.sums[kChunk - 1][c] - low),
                            of_key * __expf(s.sums[kChunk - 1][c + 1] - high));
    }
    *reinterpret_cast<uint4*>(to + at) = make_uint4(begun[0], begun[1], begun[2], begun[3]);
    *reinterpret_cast<uint4*>(to + kPanels * kPanelBytes + at) = make_uint4(asked[0], asked[1], asked[2], asked[3]);
    *reinterpret_cast<uint4*>(to + 2 * kPanels * kPanelBytes + at) = make_uint4(ended[0], ended[1], ended[2], ended[3]);
  }
}

// Grid: heads x places, in one dimension.
template <int kKeys>
__global__ void __launch_bounds__(kLocalThreads) chunk_channels_kernel(const __grid_constant__ LinearPrefill p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  ChannelsShared<kKeys>& s = *reinterpret_cast<ChannelsShared<kKeys>*>(memory);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int head = blockIdx.x % step.num_heads, group = head / step.heads_per_group;
  const int64_t place = blockIdx.x / step.num_heads;
  const ChunkPlace chunk(p, place);
  if (chunk.count == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t keys = smem_address(s.k), queries = smem_address(s.q);
  copy_rows<kKeys / 64, kLocalThreads>(keys, step.k, group, chunk.begin, chunk.count, 0, step.key_dim);
  copy_rows<kKeys / 64, kLocalThreads>(queries, step.q, group, chunk.begin, chunk.count, 0, step.key_dim);
  sum_channels(step, chunk, head, s);
  if (threadIdx.x < kChunk) {
    const bool real = static_cast<int>(threadIdx.x) < chunk.count;
    s.coefficient[threadIdx.x] = real ? token_coefficient<true>(step, chunk.begin + threadIdx.x, head) : 0.f;
    s.key_scale[threadIdx.x] = 1.f;
    s.query_scale[threadIdx.x] = step.scale;
  }
  for (int i = threadIdx.x; i < kPanelBytes / 16; i += kLocalThreads) {
    reinterpret_cast<uint4*>(s.p)[i] = make_uint4(0, 0, 0, 0);
  }
  cp_async_wait_all();
  __syncthreads();
  if (step.normalize) {
    const int row = threadIdx.x / 2, half = threadIdx.x % 2;
    const float key_norm = row_norm<kKeys>(s.k, row, half), query_norm = row_norm<kKeys>(s.q, row, half);
    if (half == 0) {
      s.key_scale[row] = rsqrtf(key_norm + kNormEpsilon);
      s.query_scale[row] = step.scale * rsqrtf(query_norm + kNormEpsilon);
    }
  }
  __syncthreads();
  // Six blocks below the diagonal for four warps.
  const auto take_far = [&](int row, int column) {
    float kk[2][4] = {}, qk[2][4] = {};
    multiply_far(s, row, column, kk, qk);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 16 * row + g + 8 * h, j = 16 * column + 8 * n + 2 * t;
        const float of_key = s.coefficient[i] * s.key_scale[i], low = s.key_scale[j], high = s.key_scale[j + 1];
        *reinterpret_cast<float2*>(&s.l[i][j]) =
            make_float2(of_key * low * kk[n][2 * h], of_key * high * kk[n][2 * h + 1]);
        *reinterpret_cast<uint32_t*>(s.p + panel_at(i, j / 8) + 4 * t) =
            pack2<__nv_bfloat16>(s.query_scale[i] * low * qk[n][2 * h], s.query_scale[i] * high * qk[n][2 * h + 1]);
      }
    }
  };
  for (int block = warp; block < 6; block += 4) {  // (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)
    const int row = block == 0 ? 1 : block < 3 ? 2 : 3;
    take_far(row, block - row * (row - 1) / 2);
  }
  multiply_near(s, warp);
  __syncthreads();

  constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = true, .channels = true};
  unsigned char* to = static_cast<unsigned char*>(p.scratch) + (place * step.num_heads + head) * kLayout.bytes();
  for (int i = threadIdx.x; i < kPanelBytes / 16; i += kLocalThreads) {
    reinterpret_cast<uint4*>(to + kLayout.p_at())[i] = reinterpret_cast<const uint4*>(s.p)[i];
  }
  float* factors = reinterpret_cast<float*>(to + kLayout.factors_at());
  for (int c = threadIdx.x; c < kKeys; c += kLocalThreads) factors[c] = __expf(s.sums[kChunk - 1][c]);
  if (threadIdx.x < kChunk) factors[kBetaRow * kChunk + threadIdx.x] = s.coefficient[threadIdx.x];
  store_decayed(s, to + kLayout.keys_at());
  invert(s);
  store_inverse(s, to);
}

template <int kKeys>
void launch_chunk_channels(const char* what, const LinearPrefill& p, cudaStream_t stream) {
  const int64_t blocks = chunk_places(p.num_tokens, p.step.batch_size) * p.step.num_heads;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(what) + ": more than 2^31 chunks of heads");
  if (blocks == 0) return;  // a grid of zero CTAs is a launch error
  constexpr int kBytes = static_cast<int>(sizeof(ChannelsShared<kKeys>));
  const LaunchShape shape{
      .blocks = static_cast<int>(blocks), .threads = kLocalThreads, .shared_bytes = kBytes, .max_shared_bytes = kBytes};
  launch_dependent<&chunk_channels_kernel<kKeys>>(what, shape, stream, p);
}

}  // namespace attnops
