#pragma once
#include "device/common/linear_verify.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm80/mma.cuh"

// What linear_verify_tiles.cuh multiplies: where it lies in shared memory, and how drafts come there.
namespace attnops {

inline constexpr int kTileRows = 16;  // of a warp
inline constexpr int kTileKeys = 128;
inline constexpr int kTileStride = kTileKeys + 16;  // two rows that are read at the same time have different banks

// Of a CTA, that have rows. Mamba2 has 64 rows a head, models of the delta rule 128.
template <bool kDelta>
inline constexpr int kTileWarps = kDelta ? 8 : 4;
template <bool kDelta>
inline constexpr int kTileCtaRows = kTileRows * kTileWarps<kDelta>;
template <bool kDelta>
inline constexpr int kTileThreads = 32 * (kTileWarps<kDelta> + 1);

// Drafts of eight columns: each with its key and its query, or with its query alone.
template <bool kDelta>
inline constexpr int kBlockDrafts = kDelta ? 4 : 8;

// Shared memory, by offsets in floats.
struct VerifyTileLayout {
  int drafts, blocks, columns;  // what the state is multiplied with, in blocks of eight
  int cta_rows, rows_before;    // rows_before: of a ring, at most
  int state_stride;             // of its rows
  bool channels;

  __host__ __device__ int total_rows() const { return rows_before + drafts; }
  __host__ __device__ int whole_rows() const { return round_up(total_rows(), kTileRows); }
  __host__ __device__ int product_stride() const { return 8 * blocks; }
  __host__ __device__ int key_stride() const { return kTileStride; }
  __host__ __device__ int row_keys() const { return cta_rows * state_stride; }  // behind the state: [rows, stride]
  // [columns, stride] twice
  __host__ __device__ int factors() const { return row_keys() + whole_rows() * kTileStride; }
  __host__ __device__ int products() const { return factors() + 2 * columns * kTileStride; }       // [rows, 8 blocks]
  __host__ __device__ int values() const { return products() + whole_rows() * product_stride(); }  // [ring, CTA's rows]
  __host__ __device__ int decays() const { return values() + rows_before * cta_rows; }  // [rows], or [rows, keys]
  __host__ __device__ int coefficients() const { return decays() + total_rows() * (channels ? kTileKeys : 1); }
  __host__ __device__ int state_decays() const { return coefficients() + drafts; }
  __host__ __device__ int floats() const { return round_up(state_decays() + drafts, 4); }
  // With gates per channel, until walk_back puts there what it has made of them.
  __host__ __device__ int queries() const { return factors() + kTileStride; }
  __host__ __device__ int query_stride() const { return 2 * kTileStride; }
};

template <typename State, bool kDelta, bool kChannels, int kBlocks>
__host__ __device__ VerifyTileLayout verify_tiles(const LinearVerify& p) {
  return {.drafts = p.drafts,
          .blocks = kBlocks,
          .columns = (kDelta ? 2 : 1) * p.drafts,
          .cta_rows = kTileCtaRows<kDelta>,
          .rows_before = p.rings.rows - p.drafts,
          .state_stride = kTileKeys * static_cast<int>(sizeof(State)) / 4 + 16,
          .channels = kChannels};
}

// A number as a sum of two that the product reads whole: its nearest of 11 bits, and what is left of it.
__device__ __forceinline__ void split(float x, float& large, float& small) {
  large = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
  small = x - large;
}

// A column's place among those that the state is multiplied with.
template <bool kDelta>
__device__ __forceinline__ int column_of(int draft, bool by_query) {
  return kDelta ? 2 * draft + by_query : draft;
}

// Four numbers of such a column.
__device__ __forceinline__ void store_factors(float* factors, int columns, int n, int column, const float (&x)[4]) {
  float large[4], small[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split(x[i], large[i], small[i]);
  float* to = factors + n * kTileStride + column;
  *reinterpret_cast<float4*>(to) = make_float4(large[0], large[1], large[2], large[3]);
  *reinterpret_cast<float4*>(to + columns * kTileStride) = make_float4(small[0], small[1], small[2], small[3]);
}

// What a draft of bf16 brings, by one warp, four columns a lane: asked for at once, and made its key, query and gates
// later, since a conversion waits for its load.
template <bool kDelta, bool kChannels>
struct TileDraft {
  static constexpr int kGates = kChannels ? 4 : 1;
  uint2 keys, queries;
  uint32_t gates[kGates] = {}, b = 0;
  float biases[kGates] = {}, a_log = 0.f;

  __device__ __forceinline__ void load(const LinearStep& p, int64_t token, int head, int group) {
    const int lane = threadIdx.x % 32;
    const auto pair = [&](const StepRows& rows) {
      return *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(rows.data) +
                                             token * rows.stride_request + group * rows.stride_head + 4 * lane);
    };
    keys = pair(p.k);
    queries = pair(p.q);
    const bool wide = p.gate_dtype == DType::kFloat32;
    const auto bits = [&](const StepRows& rows, int i) -> uint32_t {
      const int64_t at = token * rows.stride_request + head * rows.stride_head + i;
      if (wide) return static_cast<const uint32_t*>(rows.data)[at];
      return static_cast<const uint16_t*>(rows.data)[at];
    };
#pragma unroll
    for (int i = 0; i < kGates; ++i) {
      const int column = kChannels ? 4 * lane + i : 0;
      if (p.a.data != nullptr) gates[i] = bits(p.a, column);
      if (p.dt_bias != nullptr) biases[i] = p.dt_bias[kChannels ? head * kTileKeys + column : head];
    }
    if (kDelta) b = bits(p.b, 0);
    if (p.a_log != nullptr) a_log = p.a_log[head];
  }

  __device__ __forceinline__ float gate(const LinearStep& p, uint32_t bits) const {
    return __uint_as_float(p.gate_dtype == DType::kFloat32 ? bits : bits << 16);
  }

  // To shared memory, and the key and decay to the ring's new row where `ring_key` and `ring_decay` are given.
  __device__ __forceinline__ void make(const LinearStep& p, const VerifyTileLayout& at, float* shared, int draft,
                                       float* ring_key, float* ring_decay) const {
    const int lane = threadIdx.x % 32, row = at.rows_before + draft;
    const auto four = [](uint2 words, float(&x)[4]) {
      x[0] = __uint_as_float(words.x << 16), x[1] = __uint_as_float(words.x & 0xffff0000u);
      x[2] = __uint_as_float(words.y << 16), x[3] = __uint_as_float(words.y & 0xffff0000u);
    };
    float key[4], query[4], sums[2] = {};
    four(keys, key);
    four(queries, query);
    float query_scale = p.scale;
    if (p.normalize) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[0] = fmaf(key[i], key[i], sums[0]), sums[1] = fmaf(query[i], query[i], sums[1]);
      const float key_scale = rsqrtf(sum_of_lanes<32>(sums[0]) + kNormEpsilon);
      query_scale *= rsqrtf(sum_of_lanes<32>(sums[1]) + kNormEpsilon);
#pragma unroll
      for (int i = 0; i < 4; ++i) key[i] *= key_scale;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) query[i] *= query_scale;
    const float4 as_vec = make_float4(key[0], key[1], key[2], key[3]);
    *reinterpret_cast<float4*>(shared + at.row_keys() + row * kTileStride + 4 * lane) = as_vec;
    if (ring_key != nullptr) *reinterpret_cast<float4*>(ring_key + 4 * lane) = as_vec;
    const float a = p.a.data != nullptr ? gate(p, gates[0]) : 1.f;
    const TokenGate own = gate_of<kDelta>(p, a, gate(p, b), a_log, biases[0]);
    if (lane == 0) shared[at.coefficients() + draft] = own.coefficient;
    if constexpr (kChannels) {
      *reinterpret_cast<float4*>(shared + at.queries() + draft * at.query_stride() + 4 * lane) =
          make_float4(query[0], query[1], query[2], query[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float decay = expf(log_decay(gate(p, gates[i]), p.a_log != nullptr, a_log, biases[i], p.lower_bound));
        shared[at.decays() + row * kTileKeys + 4 * lane + i] = decay;
        if (ring_decay != nullptr) ring_decay[4 * lane + i] = decay;
      }
    } else {
      if constexpr (kDelta) store_factors(shared + at.factors(), at.columns, 2 * draft, 4 * lane, key);
      store_factors(shared + at.factors(), at.columns, column_of<kDelta>(draft, true), 4 * lane, query);
      if (lane == 0) {
        const float decay = expf(own.log_decay);
        shared[at.decays() + row] = decay;
        if (ring_decay != nullptr) *ring_decay = decay;
      }
    }
  }
};

}  // namespace attnops
