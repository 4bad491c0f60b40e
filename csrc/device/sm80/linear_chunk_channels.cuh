#pragma once
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm80/linear_chunk_near.cuh"

// The part of a chunk that no state is needed for, where each channel of the keys has a gate of its own (section 3 of
// arXiv 2510.26692). The decay then stands inside the sums over channels. Between blocks of 16 tokens it is split at
// the first token of the later block, so that both parts are at most 1; within a block it is made for each pair. That
// is for chunks that decay a lot: others are linear_chunk_near.cuh's.
namespace attnops {

template <int kKeys>
struct ChannelsShared {
  static constexpr int kPanels = kKeys / 64, kSumStride = kKeys + 4;
  union {
    alignas(1024) unsigned char rows[2 * kPanels * kPanelBytes];  // keys, then queries
    LocalProducts<1> made;
  };
  union {
    float sums[1 + kChunk][kSumStride];  // of log-decays before a token's own, to base 2; of all in the last row
    alignas(1024) NearShared<kKeys> near;
  };
  float2 scales[kChunk];  // of a token's key and query
  float coefficient[kChunk], key_scale[kChunk], query_scale[kChunk];
  float products[kChunk];  // of a token's own key and query, which decay nothing

  __device__ const unsigned char* keys() const { return rows; }
  __device__ const unsigned char* queries() const { return rows + kPanels * kPanelBytes; }
  __device__ const float* sums_at(int token) const { return sums[token + 1]; }  // with its own
};

// By fast functions: what bf16 does not tell apart.
__device__ __forceinline__ float fast_softplus(float x) { return fmaxf(x, 0.f) + __logf(1.f + __expf(-fabsf(x))); }

// Running sums of the log-decays, a channel a thread. Types and kinds of gates are told apart around many loads, not
// at each: a load in a branch of its own is waited for before the next one is asked for.
template <int kKeys>
__device__ __forceinline__ void sum_channels(const LinearStep& p, const ChunkPlace& chunk, int head,
                                             ChannelsShared<kKeys>& s) {
  constexpr int kAhead = 16;
  const bool logits = p.a_log != nullptr;
  const float rate = logits ? expf(p.a_log[head]) : 0.f;
  for (int c = threadIdx.x; c < kKeys; c += kLocalThreads) {
    const bool inside = c < p.key_dim;
    const float bias = p.dt_bias != nullptr && inside ? p.dt_bias[int64_t{head} * p.key_dim + c] : 0.f;
    const int count = inside ? chunk.count : 0;
    float sum = 0.f;
    s.sums[0][c] = 0.f;
    with_token_type(p.gate_dtype, [&](auto type) {
      using Gate = decltype(type);
      const Gate* from =
          static_cast<const Gate*>(p.a.data) + chunk.begin * p.a.stride_request + head * p.a.stride_head + c;
      for (int t = 0; t < kChunk; t += kAhead) {
        Gate gates[kAhead];
        float decays[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) gates[i] = t + i < count ? from[(t + i) * p.a.stride_request] : Gate(0.f);
        if (!logits) {
#pragma unroll
          for (int i = 0; i < kAhead; ++i) decays[i] = static_cast<float>(gates[i]);
        } else if (p.lower_bound < 0.f) {
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            decays[i] = __fdividef(p.lower_bound, 1.f + __expf(-rate * (static_cast<float>(gates[i]) + bias)));
          }
        } else {
#pragma unroll
          for (int i = 0; i < kAhead; ++i) decays[i] = -rate * fast_softplus(static_cast<float>(gates[i]) + bias);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          sum += t + i < count ? fmaxf(decays[i], kLeastLogDecay) : 0.f;
          s.sums[1 + t + i][c] = kLog2e * sum;
        }
      }
    });
  }
}

// A word of a fragment, two channels from `c` on, under the decay from one row of sums to another.
__device__ __forceinline__ uint32_t decay_pair(uint32_t word, const float* to, const float* from, int c) {
  const float2 last = *reinterpret_cast<const float2*>(to + c), first = *reinterpret_cast<const float2*>(from + c);
  return scale_pair(word, exp2_approx(last.x - first.x), exp2_approx(last.y - first.y));
}

// Products of a block of 16 rows with the blocks before it, and where `near` with itself: of keys and of queries with
// keys, columns 0 to 7 and 8 to 15 of each block. The decay is split at the first of the rows, so it is at most 1 on
// both sides; within the block, where a key's is above 1, what the warp has checked.
template <int kKeys>
__device__ __forceinline__ void multiply_rows(const ChannelsShared<kKeys>& s, int block, bool near,
                                              float (&kk)[4][2][4], float (&qk)[4][2][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t keys = smem_address(s.keys()), queries = smem_address(s.queries());
  const float* anchor = s.sums_at(16 * block - 1);
#pragma unroll 2
  for (int i = 0; i < kKeys / 16; ++i) {
    const uint32_t panel = i / 4 * kPanelBytes;
    uint32_t a_keys[4], a_queries[4];
    load_a(a_keys, keys + panel, 16 * block, i % 4);
    load_a(a_queries, queries + panel, 16 * block, i % 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = 16 * i + 8 * (j / 2) + 2 * t;
      const float* sums = s.sums_at(16 * block + g + j % 2 * 8);
      const float2 last = *reinterpret_cast<const float2*>(sums + c);
      const float2 first = *reinterpret_cast<const float2*>(anchor + c);
      const float low = exp2_approx(last.x - first.x), high = exp2_approx(last.y - first.y);
      a_keys[j] = scale_pair(a_keys[j], low, high);
      a_queries[j] = scale_pair(a_queries[j], low, high);
    }
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      if (column > block || (column == block && !near)) break;
      uint32_t b[4];
      load_b(b, keys + panel, 16 * column, i % 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        b[j] = decay_pair(b[j], anchor, s.sums_at(16 * column + g + j / 2 * 8), 16 * i + 8 * (j % 2) + 2 * t);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_m16n8k16<__nv_bfloat16>(kk[column][n], a_keys, b[2 * n], b[2 * n + 1]);
        mma_m16n8k16<__nv_bfloat16>(qk[column][n], a_queries, b[2 * n], b[2 * n + 1]);
      }
    }
  }
}

// Whether no channel decays by more than 2^-100 within a block of 16 tokens, so that its inverse is a number, too.
template <int kKeys>
__device__ __forceinline__ bool decays_little(const ChannelsShared<kKeys>& s, int block) {
  bool little = true;
  for (int c = threadIdx.x % 32; c < kKeys; c += 32) {
    little = little && s.sums_at(16 * block - 1)[c] - s.sums_at(16 * block + 15)[c] <= 100.f;
  }
  return __all_sync(0xffffffffu, little);
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

// The products within a block of any decay, each pair of tokens by itself: lanes have channels, a row at a time.
template <int kKeys>
__device__ __forceinline__ void multiply_near(const ChannelsShared<kKeys>& s, int block, float (&kk)[2][4],
                                              float (&qk)[2][4]) {
  constexpr int kEach = kKeys / 32;
  const int lane = threadIdx.x % 32, first = lane * kEach, g = lane / 4, t = lane % 4;
  const auto load_sums = [&](float(&x)[kEach], int token) {
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(s.sums_at(token) + first + i);
      x[i] = pair.x, x[i + 1] = pair.y;
    }
  };
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const int row = 16 * block + i;
    float sums[kEach], keys[kEach], queries[kEach], products[32];
    load_sums(sums, row);
    load_channels(keys, s.keys(), row, first);
    load_channels(queries, s.queries(), row, first);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      products[j] = products[16 + j] = 0.f;
      if (j > i) continue;
      float others[kEach], other_keys[kEach];
      load_sums(others, 16 * block + j);
      load_channels(other_keys, s.keys(), 16 * block + j, first);
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        const float scaled = other_keys[c] * exp2_approx(sums[c] - others[c]);
        products[j] = fmaf(keys[c], scaled, products[j]);
        products[16 + j] = fmaf(queries[c], scaled, products[16 + j]);
      }
    }
    const float product = sum_across(products);  // lane j has that of keys with token j, lane 16 + j that of queries
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_key = __shfl_sync(0xffffffffu, product, 8 * n + 2 * t + e);
        const float of_query = __shfl_sync(0xffffffffu, product, 16 + 8 * n + 2 * t + e);
        if (i == g) kk[n][e] = of_key, qk[n][e] = of_query;
        if (i == g + 8) kk[n][2 + e] = of_key, qk[n][2 + e] = of_query;
      }
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
    const uint4 keys = *reinterpret_cast<const uint4*>(s.keys() + at);
    const uint4 queries = *reinterpret_cast<const uint4*>(s.queries() + at);
    const uint32_t key_words[4] = {keys.x, keys.y, keys.z, keys.w};
    const uint32_t query_words[4] = {queries.x, queries.y, queries.z, queries.w};
    uint32_t begun[4], asked[4], ended[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = 64 * panel + 8 * chunk + 2 * j;
      const float2 since = *reinterpret_cast<const float2*>(s.sums_at(row) + c);
      const float2 all = *reinterpret_cast<const float2*>(s.sums_at(kChunk - 1) + c);
      const float decay_low = exp2_approx(since.x), decay_high = exp2_approx(since.y), of_key = s.key_scale[row];
      begun[j] = scale_pair(key_words[j], of_key * decay_low, of_key * decay_high);
      asked[j] = scale_pair(query_words[j], s.query_scale[row] * decay_low, s.query_scale[row] * decay_high);
      ended[j] = scale_pair(key_words[j], of_key * exp2_approx(all.x - since.x), of_key * exp2_approx(all.y - since.y));
    }
    *reinterpret_cast<uint4*>(to + at) = make_uint4(begun[0], begun[1], begun[2], begun[3]);
    *reinterpret_cast<uint4*>(to + kPanels * kPanelBytes + at) = make_uint4(asked[0], asked[1], asked[2], asked[3]);
    *reinterpret_cast<uint4*>(to + 2 * kPanels * kPanelBytes + at) = make_uint4(ended[0], ended[1], ended[2], ended[3]);
  }
}

// Each token's key and query times themselves and one another, of a warp's 16 rows: what they are scaled with, and the
// product of both.
template <int kKeys>
__device__ __forceinline__ void scale_rows(const LinearStep& step, ChannelsShared<kKeys>& s) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint32_t keys = smem_address(s.keys()), queries = smem_address(s.queries());
  float kk[2][4] = {}, qq[2][4] = {}, qk[2][4] = {};
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    uint32_t k[4], q[4];
    load_a(k, keys + i / 4 * kPanelBytes, 16 * warp, i % 4);
    load_a(q, queries + i / 4 * kPanelBytes, 16 * warp, i % 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {  // the same rows as columns
      mma_m16n8k16<__nv_bfloat16>(kk[n], k, k[n], k[n + 2]);
      mma_m16n8k16<__nv_bfloat16>(qk[n], q, k[n], k[n + 2]);
      mma_m16n8k16<__nv_bfloat16>(qq[n], q, q[n], q[n + 2]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * t + i != g) continue;  // a row's products are with one lane
      const int row = 16 * warp + g + 8 * r, at = 2 * r + i;
      const float key_scale = step.normalize ? rsqrtf(kk[r][at] + kNormEpsilon) : 1.f;
      const float query_scale = query_scale_of(step, step.normalize, qq[r][at]);
      s.key_scale[row] = key_scale, s.query_scale[row] = query_scale;
      s.scales[row] = make_float2(key_scale, query_scale);
      s.products[row] = qk[r][at];
    }
  }
}

// Masked products of keys and queries that have their scales: the strict lower triangle, and a panel in `to`.
template <int kKeys>
__device__ __forceinline__ void put_near(ChannelsShared<kKeys>& s, const float (&kk)[4][2][4],
                                         const float (&qk)[4][2][4], unsigned char* to) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = 16 * warp + g + 8 * h;
    const float own = s.products[i] * s.key_scale[i] * s.query_scale[i];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      uint32_t pair = 0;
      if (n <= 2 * warp + 1) {
        const int j = 8 * n + 2 * t;
        const float* of = kk[n / 2][n % 2] + 2 * h;
        float low = qk[n / 2][n % 2][2 * h], high = qk[n / 2][n % 2][2 * h + 1];
        float2 keys = make_float2(of[0], of[1]);
        if (n < 2 * warp) {
          keys = make_float2(near_tf32(keys.x), near_tf32(keys.y));
        } else {  // what lies on and above the diagonal of keys is not read
          low = j == i ? own : j < i ? low : 0.f;
          high = j + 1 == i ? own : j + 1 < i ? high : 0.f;
        }
        *reinterpret_cast<float2*>(&s.made.l[0].at[i][j]) = keys;
        pair = pack2<__nv_bfloat16>(low, high);
      }
      *reinterpret_cast<uint32_t*>(to + panel_at(i, n) + 4 * t) = pair;
    }
  }
}

// Grid: heads x places, in one dimension.
template <int kKeys>
__global__ void __launch_bounds__(kLocalThreads, 3) chunk_channels_kernel(const __grid_constant__ LinearPrefill p) {
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
  const uint32_t keys = smem_address(s.keys()), queries = smem_address(s.queries());
  copy_rows<kKeys / 64, kLocalThreads>(keys, step.k, group, chunk.begin, chunk.count, 0, step.key_dim);
  copy_rows<kKeys / 64, kLocalThreads>(queries, step.q, group, chunk.begin, chunk.count, 0, step.key_dim);
  float2 sums[ChannelPair<kKeys>::kTokens];
  const bool own_near = sum_blocks(step, chunk, head, s.near, sums);
  if (threadIdx.x < kChunk) {
    const bool real = static_cast<int>(threadIdx.x) < chunk.count;
    s.coefficient[threadIdx.x] = real ? token_coefficient<true>(step, chunk.begin + threadIdx.x, head) : 0.f;
    s.key_scale[threadIdx.x] = 1.f;
    s.query_scale[threadIdx.x] = step.scale;
  }
  cp_async_wait_all();
  const bool all_near = __syncthreads_and(own_near);
  if (!all_near) sum_channels(step, chunk, head, s);
  scale_rows(step, s);
  constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = true, .channels = true};
  unsigned char* to = static_cast<unsigned char*>(p.scratch) + (place * step.num_heads + head) * kLayout.bytes();
  __syncthreads();
  float kk[4][2][4] = {}, qk[4][2][4] = {};  // of the warp's 16 rows with each block of 16
  if (all_near) {
    decay_rows<kKeys>(sums, s.near, s.scales, s.rows, s.rows + kKeys / 64 * kPanelBytes, to + kLayout.keys_at());
    float* factors = reinterpret_cast<float*>(to + kLayout.factors_at());
    for (int c = threadIdx.x; c < kKeys; c += kLocalThreads) {
      float all = 0.f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) all += s.near.totals[b][c];
      factors[c] = exp2_approx(all);
    }
    __syncthreads();
    multiply_blocks(s.near, keys, queries, warp, kk, qk);
    __syncthreads();  // keys and queries have been read
    put_near(s, kk, qk, to + kLayout.p_at());
    __syncthreads();
    invert<MeetCta>(s.made, 1, s.coefficient, 0);
    return store_inverse(s.made.l[0], to);
  }
  const bool near = decays_little(s, warp);
  multiply_rows(s, warp, near, kk, qk);
  if (!near) {
    float own_kk[2][4] = {}, own_qk[2][4] = {};
    multiply_near(s, warp, own_kk, own_qk);
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      if (column != warp) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) kk[column][i / 4][i % 4] = own_kk[i / 4][i % 4];
#pragma unroll
      for (int i = 0; i < 8; ++i) qk[column][i / 4][i % 4] = own_qk[i / 4][i % 4];
    }
  }
  store_decayed(s, to + kLayout.keys_at());
  float* factors = reinterpret_cast<float*>(to + kLayout.factors_at());
  for (int c = threadIdx.x; c < kKeys; c += kLocalThreads) factors[c] = exp2_approx(s.sums_at(kChunk - 1)[c]);
  __syncthreads();  // keys and queries have been read

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = 16 * warp + g + 8 * h;
    const float of_key = s.key_scale[i], of_query = s.query_scale[i];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = 8 * n + 2 * t;
      const float low = s.key_scale[j], high = s.key_scale[j + 1];
      const float* keys_at = kk[n / 2][n % 2] + 2 * h;
      const float* queries_at = qk[n / 2][n % 2] + 2 * h;
      float2 pair = make_float2(j < i ? of_key * low * keys_at[0] : 0.f, j + 1 < i ? of_key * high * keys_at[1] : 0.f);
      if (n < 2 * warp) pair = make_float2(near_tf32(pair.x), near_tf32(pair.y));
      *reinterpret_cast<float2*>(&s.made.l[0].at[i][j]) = pair;
      const float own[2] = {j == i ? s.products[i] : queries_at[0], j + 1 == i ? s.products[i] : queries_at[1]};
      *reinterpret_cast<uint32_t*>(s.made.p[0] + panel_at(i, n) + 4 * t) =
          pack2<__nv_bfloat16>(j <= i ? of_query * low * own[0] : 0.f, j + 1 <= i ? of_query * high * own[1] : 0.f);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kPanelBytes / 16; i += kLocalThreads) {
    reinterpret_cast<uint4*>(to + kLayout.p_at())[i] = reinterpret_cast<const uint4*>(s.made.p[0])[i];
  }
  invert<MeetCta>(s.made, 1, s.coefficient, 0);
  store_inverse(s.made.l[0], to);
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
