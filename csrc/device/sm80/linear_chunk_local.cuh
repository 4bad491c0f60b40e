#pragma once
#include <type_traits>

#include "core/linear_chunk.h"
#include "device/common/linear_token.cuh"
#include "device/sm80/linear_chunk_inverse.cuh"
#include "device/sm80/panel.cuh"

// The part of a chunk that no state is needed for, all chunks at once: of each head the masked products of keys and
// queries, and the inverse that turns values into the delta rule's updates. Section 3.3 of arXiv 2412.06464; the
// inverse is made of blocks, in float32 and in pairs of bf16, so that rounding it once is its only error.
namespace attnops {

inline constexpr int kLocalHeads = 4, kLocalPair = 2;  // heads of a CTA at most, and at once
inline constexpr float kLeastLogDecay = -88.f;         // of a token: its exponential is 0 in bf16

// What tokens are of one another, of the rows of a warp: 16 warp + g and + 8, columns 8 n + 2 t and + 1 at 4 n.
struct TokenProducts {
  float key_key[32], query_key[32];
  float query_query[2][4];  // square_queries
};

struct ChunkPlace {
  int64_t request, begin;
  int count;  // of tokens; 0: nothing is here

  // Asked for by whole warps, which look at 32 requests at once.
  __device__ ChunkPlace(const LinearPrefill& p, int64_t place) : request(-1), begin(0), count(0) {
    int low = -1, high = p.step.batch_size;  // the last request whose chunks begin at or before the place
    while (high - low > 1) {
      const int step = static_cast<int>(static_cast<uint32_t>(high - low + 32) / 33);
      const int probe = low + (static_cast<int>(threadIdx.x) % 32 + 1) * step;
      const bool before = probe < high && p.first_token(probe) / kChunk + 2 * int64_t{probe} <= place;
      const int last = 32 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, before)));  // of the probes, from 1
      high = min_of(high, low + (last + 1) * step);
      low += last * step;
    }
    if (low < 0 || !p.in_pool(p.step.state_indices[low])) return;
    const RequestChunks chunks(p, low);
    const int64_t chunk = place - chunks.place;
    if (chunk >= chunks.count()) return;
    request = low, begin = chunks.begin(chunk), count = chunks.size(chunk);
  }
};

// What tokens make of one another, of kHeads heads at a time. It lies where keys and queries were.
template <int kHeads, bool kQueries = true>
struct LocalProducts {
  static constexpr int kStride = 68, kHeadsAtOnce = kHeads;
  struct Lower {
    static constexpr int kRow = kStride;
    float at[kChunk][kStride];  // the strict lower triangle, then its inverse
    float pad[16];              // rows of two heads lie in different banks
  };
  unsigned char p[kQueries ? kHeads : 1][kQueries ? kPanelBytes : 16];
  Lower l[kHeads];
};

// kQueries: whether the masked products of queries are made here.
template <int kKeys, bool kQueries = true>
struct LocalShared {
  using Made = LocalProducts<kLocalPair, kQueries>;
  static constexpr int kRowBytes = (kQueries ? 2 : 1) * kKeys / 64 * kPanelBytes;
  // Keys, then queries; then what is made of them. No union, whose end would be a multiple of 1024 bytes: six CTAs have
  // all bytes of an SM.
  alignas(1024) unsigned char rows[max_of(kRowBytes, static_cast<int>(sizeof(Made)))];
  float sums[kLocalHeads][kChunk];  // of log-decays, to base 2
  float coefficient[kLocalHeads][kChunk];
  float key_scale[kChunk], query_scale[kChunk];

  __device__ Made& made() { return reinterpret_cast<Made&>(rows); }
};

// Rows of 16-bit tokens into panels; what is no token and no column becomes zeros.
template <int kPanels, int kThreads>
__device__ __forceinline__ void copy_rows(uint32_t panels, const StepRows& rows, int head, int64_t begin, int count,
                                          int first_column, int columns) {
  constexpr int kAcross = kPanels * 8, kStep = kThreads / kAcross;
  static_assert(kThreads % kAcross == 0 && kChunk % kStep == 0);
  const int first = threadIdx.x % kThreads / kAcross, chunk = threadIdx.x % kAcross, column = first_column + chunk * 8;
  const char* base = static_cast<const char*>(rows.data) + 2 * (begin * rows.stride_request + head * rows.stride_head);
  const char* from = base + 2 * (first * rows.stride_request + column);
#pragma unroll
  for (int i = 0; i < kChunk / kStep; ++i, from += 2 * kStep * rows.stride_request) {
    const int row = first + i * kStep;
    const bool take = row < count && column < columns;
    const uint32_t at = kStep % 8 == 0 ? panel_at(first, chunk % 8) + i * kStep * 128 : panel_at(row, chunk % 8);
    cp_async_16(panels + chunk / 8 * kPanelBytes + at, take ? from : base, take);
  }
}

// Gates of two tokens a lane, as they lie.
struct GateWords {
  uint32_t a[2], b[2];
};

template <bool kDelta>
__device__ __forceinline__ GateWords load_gates(const LinearStep& p, int64_t begin, int count, int head) {
  GateWords words{};
  with_token_type(p.gate_dtype, [&](auto type) {  // so that no load waits for another
    using Bits = std::conditional_t<sizeof(type) == 2, uint16_t, uint32_t>;
    const auto at = [&](const StepRows& rows, int i) -> uint32_t {
      const int64_t token = begin + 2 * static_cast<int>(threadIdx.x % 32) + i;
      return static_cast<const Bits*>(rows.data)[token * rows.stride_request + head * rows.stride_head];
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = 2 * static_cast<int>(threadIdx.x % 32) + i < count;
      if (p.a.data != nullptr && there) words.a[i] = at(p.a, i);
      if (kDelta && there) words.b[i] = at(p.b, i);
    }
  });
  return words;
}

// Log-decays of a head as running sums, to base 2, and the tokens' coefficients, by one warp: two tokens a lane.
template <bool kDelta>
__device__ __forceinline__ void sum_gates(const LinearStep& p, const GateWords& words, int count, int head, float* sums,
                                          float* coefficients) {
  const int lane = threadIdx.x % 32;
  float decay[2] = {}, coefficient[2] = {}, a[2] = {1.f, 1.f}, b[2] = {};
  const float a_log = p.a_log != nullptr ? p.a_log[head] : 0.f, bias = p.dt_bias != nullptr ? p.dt_bias[head] : 0.f;
  with_token_type(p.gate_dtype, [&](auto type) {
    using Gate = decltype(type);
    const auto number = [](uint32_t word) {
      if constexpr (sizeof(Gate) == 4) {
        return __uint_as_float(word);
      } else {
        const auto bits = static_cast<uint16_t>(word);
        return static_cast<float>(reinterpret_cast<const Gate&>(bits));
      }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (p.a.data != nullptr) a[i] = number(words.a[i]);
      if (kDelta) b[i] = number(words.b[i]);
    }
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (2 * lane + i >= count) continue;
    const TokenGate gate = gate_of<kDelta>(p, a[i], b[i], a_log, bias);
    decay[i] = fmaxf(gate.log_decay, kLeastLogDecay);
    coefficient[i] = gate.coefficient;
  }
  const float pair = decay[0] + decay[1];
  float sum = pair;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += other;
  }
  float before = __shfl_up_sync(0xffffffffu, sum, 1);
  if (lane == 0) before = 0.f;
  sums[2 * lane] = kLog2e * (before + decay[0]);
  sums[2 * lane + 1] = kLog2e * (before + pair);
  coefficients[2 * lane] = coefficient[0];
  coefficients[2 * lane + 1] = coefficient[1];
}

__device__ __forceinline__ void multiply_tile(float* c, const uint32_t (&a)[4], const uint32_t* b) {
  mma_m16n8k16<__nv_bfloat16>(reinterpret_cast<float(&)[4]>(*c), a, b[0], b[1]);
}

// The products by mma.sync, of what is not above the diagonal.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void multiply_tokens(TokenProducts& made, uint32_t keys, uint32_t queries) {
  const int warp = threadIdx.x % kLocalThreads / 32;
#pragma unroll
  for (int i = 0; i < 32; ++i) made.key_key[i] = made.query_key[i] = 0.f;
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    uint32_t a_keys[4], a_queries[4];
    const uint32_t panel = i / 4 * kPanelBytes;
    if constexpr (kDelta) load_a(a_keys, keys + panel, 16 * warp, i % 4);
    load_a(a_queries, queries + panel, 16 * warp, i % 4);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > warp) break;
      uint32_t b[4];
      load_b(b, keys + panel, 16 * n, i % 4);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = 4 * (2 * n + j);
        if constexpr (kDelta) multiply_tile(made.key_key + at, a_keys, b + 2 * j);
        multiply_tile(made.query_key + at, a_queries, b + 2 * j);
      }
    }
  }
}

// 16 queries from a row on times themselves, for their norms: of either 8 columns.
template <int kKeys>
__device__ __forceinline__ void square_rows(float (&squares)[2][4], uint32_t queries, int row) {
#pragma unroll
  for (int i = 0; i < 8; ++i) squares[i / 4][i % 4] = 0.f;
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    uint32_t a[4];
    load_a(a, queries + i / 4 * kPanelBytes, row, i % 4);
    const uint32_t columns[4] = {a[0], a[2], a[1], a[3]};  // the same rows as columns
    multiply_tile(squares[0], a, columns);
    multiply_tile(squares[1], a, columns + 2);
  }
}

// Those of a warp's rows.
template <int kKeys>
__device__ __forceinline__ void square_queries(float (&squares)[2][4], uint32_t queries) {
  square_rows<kKeys>(squares, queries, 16 * (threadIdx.x % kLocalThreads / 32));
}

__device__ __forceinline__ float query_scale_of(const LinearStep& step, bool normalize, float norm) {
  return step.scale * (normalize ? rsqrtf(norm + kNormEpsilon) : 1.f);
}

// What keys are multiplied with: their norms' inverses. A row's product with itself is with one lane.
template <bool kDelta>
__device__ __forceinline__ void put_key_scales(const LinearStep& step, const float (&key_key)[32], float* to) {
  const int warp = threadIdx.x % kLocalThreads / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * t + i != g) continue;
      float norm = 0.f;
      if constexpr (kDelta) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if (n == warp) norm = key_key[4 * (2 * n + r) + 2 * r + i];
        }
      }
      to[16 * warp + g + 8 * r] = kDelta && step.normalize ? rsqrtf(norm + kNormEpsilon) : 1.f;
    }
  }
}

template <bool kDelta>
__device__ __forceinline__ void put_query_scales(const LinearStep& step, const float (&squares)[2][4], float* to) {
  const int warp = threadIdx.x % kLocalThreads / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * t + i != g) continue;
      to[16 * warp + g + 8 * r] = query_scale_of(step, kDelta && step.normalize, squares[r][2 * r + i]);
    }
  }
}

// body(n, r, row, column, what products of the row with keys of the column and the next one have of decay and scale),
// for the warp's rows and what is not above the diagonal.
template <bool kScaled = true, typename Body>
__device__ __forceinline__ void each_pair_of_tokens(const float* sums, const float* key_scale, Body&& body) {
  const int warp = threadIdx.x % kLocalThreads / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float of_row[2] = {sums[16 * warp + g], sums[16 * warp + g + 8]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n > 2 * warp + 1) break;
    const int column = 8 * n + 2 * t;
    const float2 of_column = *reinterpret_cast<const float2*>(&sums[column]);
    float2 scale = make_float2(1.f, 1.f);
    if constexpr (kScaled) scale = *reinterpret_cast<const float2*>(&key_scale[column]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      body(n, r, 16 * warp + g + 8 * r, column,
           make_float2(scale.x * exp2_approx(of_row[r] - of_column.x), scale.y * exp2_approx(of_row[r] - of_column.y)));
    }
  }
}

// Two neighbours of the masked products of queries with keys.
__device__ __forceinline__ uint32_t query_pair(const float* product, int row, int column, float2 decay, float scale) {
  return pack2<__nv_bfloat16>(column > row ? 0.f : scale * decay.x * product[0],
                              column + 1 > row ? 0.f : scale * decay.y * product[1]);
}

// Two neighbours of the strict lower triangle of keys with keys. inside: of a block that the diagonal does not cross.
template <class Lower>
__device__ __forceinline__ void put_key_pair(Lower& lower, const float* product, int row, int column, float2 decay,
                                             float scale, bool inside) {
  float2 pair = make_float2(scale * decay.x * product[0], scale * decay.y * product[1]);
  pair = inside ? make_float2(near_tf32(pair.x), near_tf32(pair.y))
                : make_float2(column >= row ? 0.f : pair.x, column + 1 >= row ? 0.f : pair.y);
  *reinterpret_cast<float2*>(&lower.at[row][column]) = pair;
}

// A head's numbers of each token, in shared memory.
struct TokenScales {
  const float *sums, *coefficient, *key, *query;
};

// The masked products of a head: queries times keys as a panel, and the strict lower triangle of keys times keys.
template <bool kDelta, bool kQueries, class Lower>
__device__ __forceinline__ void put_products(const TokenProducts& made, const TokenScales& scales,
                                             unsigned char* products, Lower& lower) {
  const int warp = threadIdx.x % kLocalThreads / 32, first = 16 * warp + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float key_scale[2], query_scale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    query_scale[r] = kQueries ? scales.query[first + 8 * r] : 0.f;
    key_scale[r] = scales.key[first + 8 * r];
  }
  each_pair_of_tokens(scales.sums, scales.key, [&](int n, int r, int row, int column, float2 decay) {
    const int at = 4 * n + 2 * r;
    if constexpr (kQueries) {
      *reinterpret_cast<uint32_t*>(products + panel_at(row, n) + 4 * t) =
          query_pair(made.query_key + at, row, column, decay, query_scale[r]);
    }
    if constexpr (kDelta) put_key_pair(lower, made.key_key + at, row, column, decay, key_scale[r], n < 2 * warp);
  });
}

// A token's factors in the chunk. Without queries their row has the sums of the log-decays.
template <bool kDelta, bool kMarks, bool kQueries>
__device__ __forceinline__ void put_factors(const TokenScales& scales, int i, float* factors) {
  const float of_token = scales.sums[i], of_all = scales.sums[kChunk - 1], decay = exp2_approx(of_token);
  const float key = kDelta ? scales.key[i] : 1.f;
  factors[i] = key * decay;
  factors[kChunk + i] = kQueries ? scales.query[i] * decay : of_token;
  factors[2 * kChunk + i] = key * exp2_approx(of_all - of_token);
  if (!kMarks || i != kMarkAt % kChunk) factors[3 * kChunk + i] = exp2_approx(of_all);
  factors[kLastRow * kChunk + i] = kDelta ? key : scales.coefficient[i];
}

// How the threads that make a chunk meet, and multiply.
struct MeetCta {
  static constexpr bool kMarks = false;  // whether a chunk's word is left to others
  __device__ static void meet() { __syncthreads(); }
  template <int kKeys, bool kDelta, bool kQueries>
  __device__ static void multiply(TokenProducts& made, uint32_t keys, uint32_t queries) {
    static_assert(kQueries);
    if constexpr (kDelta) square_queries<kKeys>(made.query_query, queries);
    multiply_tokens<kKeys, kDelta>(made, keys, queries);
  }
  __device__ static void rows_are_there() {}  // before they meet
};

// A chunk of some of a group's heads, by kLocalThreads threads.
template <int kKeys, bool kDelta, class Meet, bool kQueries>
__device__ __forceinline__ void make_chunk(const LinearPrefill& p, LocalShared<kKeys, kQueries>& s, int64_t place,
                                           int group, int part) {
  const LinearStep& step = p.step;
  const ChunkPlace chunk(p, place);
  if (chunk.count == 0) return;
  const int thread = threadIdx.x % kLocalThreads, warp = thread / 32;
  const uint32_t keys = smem_address(s.rows), queries = keys + kKeys / 64 * kPanelBytes;
  if constexpr (kDelta || kQueries) {
    copy_rows<kKeys / 64, kLocalThreads>(keys, step.k, group, chunk.begin, chunk.count, 0, step.key_dim);
  }
  if constexpr (kQueries) {
    copy_rows<kKeys / 64, kLocalThreads>(queries, step.q, group, chunk.begin, chunk.count, 0, step.key_dim);
  }
  const int first_head = part * kLocalHeads;
  const int heads = min_of(kLocalHeads, step.heads_per_group - first_head);
  const int head_base = group * step.heads_per_group + first_head;
  for (int h = warp; h < heads; h += kLocalThreads / 32) {
    const GateWords words = load_gates<kDelta>(step, chunk.begin, chunk.count, head_base + h);
    sum_gates<kDelta>(step, words, chunk.count, head_base + h, s.sums[h], s.coefficient[h]);
  }
  cp_async_wait_all();
  Meet::rows_are_there();
  Meet::meet();
  TokenProducts products;
  if constexpr (kDelta || kQueries) {
    Meet::template multiply<kKeys, kDelta, kQueries>(products, keys, queries);
    put_key_scales<kDelta>(step, products.key_key, s.key_scale);
    if constexpr (kQueries) put_query_scales<kDelta>(step, products.query_query, s.query_scale);
    Meet::meet();
  }
  auto& made = s.made();
  constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = kDelta, .channels = false};
  for (int first = 0; first < heads; first += kLocalPair) {
    const int count = min_of(kLocalPair, heads - first);
    unsigned char* to =
        static_cast<unsigned char*>(p.scratch) + (place * step.num_heads + head_base + first) * kLayout.bytes();
    const auto scales = [&](int h) {
      return TokenScales{s.sums[first + h], s.coefficient[first + h], s.key_scale, s.query_scale};
    };
    if constexpr (kQueries) {
      for (int i = thread; i < count * (kPanelBytes / 16); i += kLocalThreads) {  // what is above the diagonal stays
        reinterpret_cast<uint4*>(made.p[i / (kPanelBytes / 16)])[i % (kPanelBytes / 16)] = make_uint4(0, 0, 0, 0);
      }
      Meet::meet();
    }
    if constexpr (kDelta || kQueries) {
#pragma unroll 1
      for (int h = 0; h < count; ++h) {
        put_products<kDelta, kQueries>(products, scales(h), made.p[kQueries ? h : 0], made.l[h]);
      }
      Meet::meet();
    }
    if constexpr (kQueries) {
      for (int h = 0; h < count; ++h) {
        const uint4* of_head = reinterpret_cast<const uint4*>(made.p[h]);
        for (int i = thread; i < kPanelBytes / 16; i += kLocalThreads) {
          reinterpret_cast<uint4*>(to + h * kLayout.bytes() + kLayout.p_at())[i] = of_head[i];
        }
      }
    }
    static_assert(kLocalPair * kChunk == kLocalThreads);
    if (const int h = thread / kChunk; h < count) {
      put_factors<kDelta, Meet::kMarks, kQueries>(
          scales(h), thread % kChunk, reinterpret_cast<float*>(to + h * kLayout.bytes() + kLayout.factors_at()));
    }
    if constexpr (kDelta) {
      invert<Meet>(made, count, s.coefficient[first], kChunk);
      for (int h = 0; h < count; ++h) store_inverse(made.l[h], to + h * kLayout.bytes());
    }
    Meet::meet();
    if constexpr (Meet::kMarks) {
      if (thread < count) Meet::mark(to + thread * kLayout.bytes() + kLayout.mark_at());
    }
  }
}

// Grid: parts of a group's heads x groups x places, in one dimension.
template <int kKeys, bool kDelta, class Meet, bool kQueries>
__global__ void __launch_bounds__(kLocalThreads, kKeys > 128 ? 2
                                                 : kQueries  ? 4
                                                 : kDelta    ? 6
                                                             : 8)
    chunk_local_kernel(const __grid_constant__ LinearPrefill p, int groups, int parts) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  make_chunk<kKeys, kDelta, Meet, kQueries>(p, *reinterpret_cast<LocalShared<kKeys, kQueries>*>(memory),
                                            blockIdx.x / parts / groups, blockIdx.x / parts % groups,
                                            blockIdx.x % parts);
}

template <int kKeys, bool kDelta, class Meet = MeetCta, bool kQueries = true>
void launch_chunk_local(const char* what, const LinearPrefill& p, cudaStream_t stream) {
  const int groups = p.step.num_heads / p.step.heads_per_group, parts = ceil_div(p.step.heads_per_group, kLocalHeads);
  const int64_t blocks = chunk_places(p.num_tokens, p.step.batch_size) * groups * parts;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(what) + ": more than 2^31 chunks of heads");
  if (blocks == 0) return;  // a grid of zero CTAs is a launch error
  constexpr int kBytes = static_cast<int>(sizeof(LocalShared<kKeys, kQueries>));
  static_assert(kQueries || kKeys > 128 || 6 * (kBytes + 1024) <= 228 << 10);
  const LaunchShape shape{
      .blocks = static_cast<int>(blocks), .threads = kLocalThreads, .shared_bytes = kBytes, .max_shared_bytes = kBytes};
  launch_dependent<&chunk_local_kernel<kKeys, kDelta, Meet, kQueries>>(what, shape, stream, p, groups, parts);
}

}  // namespace attnops
