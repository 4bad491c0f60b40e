#pragma once
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm80/log2.cuh"

// Chunks with a gate per channel, where no channel decays by more than 2^-100 within a block of 16 tokens: then its
// inverse is a number, too. All decays are made once, and keys and queries are multiplied with them before the
// products.
namespace attnops {

inline constexpr int kBlock = 16, kBlocks = kChunk / kBlock;
inline constexpr float kLeastBlockDecay = -100.f;  // to base 2

// Two bf16 in a word, times two floats.
__device__ __forceinline__ uint32_t scale_pair(uint32_t word, float low, float high) {
  return pack2<__nv_bfloat16>(__uint_as_float(word << 16) * low, __uint_as_float(word & 0xffff0000u) * high);
}

// A thread's two channels, and its blocks of tokens.
template <int kKeys>
struct ChannelPair {
  static constexpr int kPairs = kKeys / 2, kOwn = kBlocks * kPairs / kLocalThreads, kTokens = kOwn * kBlock;
  int channel, first_block;

  __device__ ChannelPair() : channel(threadIdx.x % kPairs * 2), first_block(threadIdx.x / kPairs * kOwn) {}
};

// What a block's decays are seen from elsewhere, in shared memory.
template <int kKeys>
struct NearShared {
  unsigned char ended[kKeys / 64 * kPanelBytes];   // keys under the decay behind them, to their block's end
  unsigned char undone[kKeys / 64 * kPanelBytes];  // keys without the decay since their block's begin
  float totals[kBlocks][kKeys];                    // log-decays of whole blocks, to base 2
  float between[3][kKeys];                         // decays of block 1, block 2 and both
};

// Logits of tokens one after another, two channels each. All are asked for before the first is looked at.
template <typename Gate, int kTokens>
__device__ __forceinline__ void load_logits(float2 (&x)[kTokens], const Gate* from, int64_t stride, int count) {
  using Word = std::conditional_t<sizeof(Gate) == 4, uint2, uint32_t>;
  const auto put = [&](int i, const Gate* pair) { x[i] = make_float2(float(pair[0]), float(pair[1])); };
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Word) == 0 && stride % 2 == 0) {
    Word words[kTokens];
    if (count >= kTokens) {
#pragma unroll
      for (int i = 0; i < kTokens; ++i, from += stride) words[i] = *reinterpret_cast<const Word*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kTokens; ++i, from += stride) {
        words[i] = i < count ? *reinterpret_cast<const Word*>(from) : Word{};
      }
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) put(i, reinterpret_cast<const Gate*>(&words[i]));
  } else {
    Gate pairs[kTokens][2];
#pragma unroll
    for (int i = 0; i < kTokens; ++i, from += stride) {
      pairs[i][0] = i < count ? from[0] : Gate(0.f);
      pairs[i][1] = i < count ? from[1] : Gate(0.f);
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) put(i, pairs[i]);
  }
}

// Logits to log-decays to base 2.
template <int kTokens>
__device__ __forceinline__ void take_logits(const LinearStep& p, float rate, float2 bias, int count,
                                            float2 (&x)[kTokens]) {
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) x[i] = make_float2(body(x[i].x, bias.x), body(x[i].y, bias.y));
  };
  if (p.a_log == nullptr) {
    each([](float log, float) { return kLog2e * log; });
  } else if (p.lower_bound < 0.f) {
    const float least = kLog2e * p.lower_bound, base = -kLog2e * rate;
    each([&](float logit, float of) { return __fdividef(least, 1.f + exp2_approx(base * (logit + of))); });
  } else {
    each([&](float logit, float of) {
      const float power = kLog2e * (logit + of);
      return -rate * (fmaxf(power, 0.f) + log2_approx(1.f + exp2_approx(-fabsf(power))));
    });
  }
  if (count < kTokens) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i >= count) x[i] = make_float2(0.f, 0.f);
    }
  }
}

// Running sums of a thread's log-decays, each from its block's begin. False: some channel decays too much.
template <int kKeys>
__device__ __forceinline__ bool sum_blocks(const LinearStep& p, const ChunkPlace& chunk, int head, NearShared<kKeys>& s,
                                           float2 (&sums)[ChannelPair<kKeys>::kTokens]) {
  const ChannelPair<kKeys> own;
  const bool inside = own.channel < p.key_dim;
  const int channel = inside ? own.channel : 0, first = own.first_block * kBlock;
  const int count = inside ? chunk.count - first : 0;
  const float rate = p.a_log != nullptr ? expf(p.a_log[head]) : 0.f;
  float2 bias = make_float2(0.f, 0.f);
  if (p.dt_bias != nullptr) {
    const float* of = p.dt_bias + int64_t{head} * p.key_dim + channel;
    bias = make_float2(of[0], of[1]);
  }
  with_token_type(p.gate_dtype, [&](auto type) {
    using Gate = decltype(type);
    load_logits(sums,
                static_cast<const Gate*>(p.a.data) + (chunk.begin + first) * p.a.stride_request +
                    head * p.a.stride_head + channel,
                p.a.stride_request, count);
  });
  take_logits(p, rate, bias, count, sums);
  bool little = true;
#pragma unroll
  for (int b = 0; b < own.kOwn; ++b) {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      sum.x += fmaxf(sums[i].x, kLog2e * kLeastLogDecay), sum.y += fmaxf(sums[i].y, kLog2e * kLeastLogDecay);
      sums[i] = sum;
    }
    *reinterpret_cast<float2*>(&s.totals[own.first_block + b][own.channel]) = sum;
    little = little && sum.x >= kLeastBlockDecay && sum.y >= kLeastBlockDecay;
  }
  return little;
}

// Keys and queries in panels become those under the decay since their block's begin; others go beside them, and to
// `to` those that the pass takes: keys and queries under the decay since the chunk's begin, keys under that to its end.
template <int kKeys>
__device__ __forceinline__ void decay_rows(const float2 (&sums)[ChannelPair<kKeys>::kTokens], NearShared<kKeys>& s,
                                           const float2* scales, unsigned char* keys, unsigned char* queries,
                                           unsigned char* to) {
  constexpr int kPanels = kKeys / 64;
  const ChannelPair<kKeys> own;
  const int c = own.channel;
  float2 totals[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) totals[b] = *reinterpret_cast<const float2*>(&s.totals[b][c]);
  if (own.first_block == 0) {
    const auto put = [&](int i, float2 of) {
      *reinterpret_cast<float2*>(&s.between[i][c]) = make_float2(exp2_approx(of.x), exp2_approx(of.y));
    };
    put(0, totals[1]);
    put(1, totals[2]);
    put(2, make_float2(totals[1].x + totals[2].x, totals[1].y + totals[2].y));
  }
#pragma unroll
  for (int b = 0; b < own.kOwn; ++b) {
    const int block = own.first_block + b;
    float2 before = make_float2(0.f, 0.f), behind = before;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i < block) before.x += totals[i].x, before.y += totals[i].y;
      if (i > block) behind.x += totals[i].x, behind.y += totals[i].y;
    }
    before = make_float2(exp2_approx(before.x), exp2_approx(before.y));
    behind = make_float2(exp2_approx(behind.x), exp2_approx(behind.y));
    const float2 total = sums[(b + 1) * kBlock - 1], all = make_float2(exp2_approx(total.x), exp2_approx(total.y));
    const uint32_t base = c / 64 * kPanelBytes + block * kBlock * 128 + c % 8 * 2;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t at = base + panel_at(i, c % 64 / 8);
      const uint32_t key = *reinterpret_cast<const uint32_t*>(keys + at);
      const uint32_t query = *reinterpret_cast<const uint32_t*>(queries + at);
      const float2 scale = scales[block * kBlock + i], sum = sums[b * kBlock + i];
      const float2 k = make_float2(scale.x * __uint_as_float(key << 16), scale.x * __uint_as_float(key & 0xffff0000u));
      const float2 since = make_float2(exp2_approx(sum.x), exp2_approx(sum.y));
      const float2 undone = make_float2(k.x * exp2_approx(-sum.x), k.y * exp2_approx(-sum.y));
      const float2 key_since = make_float2(k.x * since.x, k.y * since.y);
      const float2 key_rest = make_float2(undone.x * all.x, undone.y * all.y);
      const float2 query_since = make_float2(scale.y * __uint_as_float(query << 16) * since.x,
                                             scale.y * __uint_as_float(query & 0xffff0000u) * since.y);
      const auto store = [](unsigned char* place, float low, float high) {
        *reinterpret_cast<uint32_t*>(place) = pack2<__nv_bfloat16>(low, high);
      };
      store(keys + at, key_since.x, key_since.y);
      store(queries + at, query_since.x, query_since.y);
      store(s.ended + at, key_rest.x, key_rest.y);
      store(s.undone + at, undone.x, undone.y);
      store(to + at, key_since.x * before.x, key_since.y * before.y);
      store(to + kPanels * kPanelBytes + at, query_since.x * before.x, query_since.y * before.y);
      store(to + 2 * kPanels * kPanelBytes + at, key_rest.x * behind.x, key_rest.y * behind.y);
    }
  }
}

// Products of a warp's 16 rows with blocks up to its own: of keys and of queries with keys, columns 0 to 7 and 8 to 15.
template <int kKeys>
__device__ __forceinline__ void multiply_blocks(const NearShared<kKeys>& s, uint32_t keys, uint32_t queries, int block,
                                                float (&kk)[4][2][4], float (&qk)[4][2][4]) {
  const int t = threadIdx.x % 4;
  const uint32_t ended = smem_address(s.ended), undone = smem_address(s.undone);
#pragma unroll 2
  for (int i = 0; i < kKeys / 16; ++i) {
    const uint32_t panel = i / 4 * kPanelBytes;
    uint32_t a_keys[4], a_queries[4];
    load_a(a_keys, keys + panel, 16 * block, i % 4);
    load_a(a_queries, queries + panel, 16 * block, i % 4);
#pragma unroll
    for (int column = 0; column < kBlocks; ++column) {
      if (column > block) break;
      uint32_t b[4];
      load_b(b, (column == block ? undone : ended) + panel, 16 * column, i % 4);
      if (column < 2 && column + 2 <= block) {
        const float* decays = s.between[column == 1 ? 1 : block == 2 ? 0 : 2] + 16 * i + 2 * t;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 decay = *reinterpret_cast<const float2*>(decays + 8 * half);
          b[half] = scale_pair(b[half], decay.x, decay.y);
          b[half + 2] = scale_pair(b[half + 2], decay.x, decay.y);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_m16n8k16<__nv_bfloat16>(kk[column][n], a_keys, b[2 * n], b[2 * n + 1]);
        mma_m16n8k16<__nv_bfloat16>(qk[column][n], a_queries, b[2 * n], b[2 * n + 1]);
      }
    }
  }
}

}  // namespace attnops
