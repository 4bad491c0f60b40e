#include "fmha/cuda/launch.cuh"

namespace attnops::fmha {
namespace {

// float32 throughout, by the CUDA cores: TF32 has 11 bits. 32 rows and 32 keys a tile. Thread (row pair, column) has
// two rows: of scores keys column, column + 8, ...; of results dims 4 * column, + 32, ...
constexpr int kTileRows = 32, kTileKeys = 32, kTileThreads = 128, kColumns = 8;

// In floats. Rows are four floats apart modulo 128 bytes, so that eight rows' equal columns lie in different banks.
template <int kDim>
struct Fp32Layout {
  static constexpr int kPitch = kDim + 4;
  static constexpr int kQ = 0;
  static constexpr int kRows = kQ + kTileRows * kPitch;  // keys, then values of the tile
  static constexpr int kWeights = kRows + kTileKeys * kPitch;
  static constexpr int kWeightPitch = kTileKeys + 1;
  static constexpr int kPlaces = round_up(kWeights + kTileRows * kWeightPitch, 4);
  static constexpr int kWork = kPlaces + Places<kTileKeys>::kBytes / 4;
  static constexpr int kBytes = 4 * (kWork + 32);
};

__device__ float4 four_of(const Params& p, const Rows& rows, const char* source) {
  if (p.kv_dtype == DType::kFloat32) {
    if (rows.keys == Copy::kPieces) return *reinterpret_cast<const float4*>(source);
    const auto* floats = reinterpret_cast<const float*>(source);
    return {floats[0], floats[1], floats[2], floats[3]};
  }
  uint32_t bytes = 0, pairs[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) bytes |= static_cast<uint32_t>(static_cast<uint8_t>(source[i])) << 8 * i;
  if (p.kv_dtype == DType::kFloat8E5M2) {
    e5m2x4_to_half(bytes, pairs[0], pairs[1]);
  } else {
    e4m3x4_to_half(bytes, pairs[0], pairs[1]);
  }
  const float2 low = __half22float2(reinterpret_cast<const __half2&>(pairs[0]));
  const float2 high = __half22float2(reinterpret_cast<const __half2&>(pairs[1]));
  return {low.x, low.y, high.x, high.y};
}

template <int kDim>
__device__ void load_rows(const Params& p, const Rows& rows, const Place* places, int64_t Place::*member,
                          const void* pool, int head_dim, float* to) {
  const int step = p.kv_dtype == DType::kFloat32 ? 4 : 1;  // bytes of an element
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kTileKeys * (kDim / 4); i += kTileThreads) {
    const int row = i / (kDim / 4), d = i % (kDim / 4) * 4;
    const int64_t at = places[row].*member;
    float4 values{};
    if (at >= 0 && d < head_dim) values = four_of(p, rows, static_cast<const char*>(pool) + at + d * step);
    *reinterpret_cast<float4*>(to + row * Fp32Layout<kDim>::kPitch + d) = values;
  }
}

template <int kDim>
__global__ void __launch_bounds__(kTileThreads)
    fmha_fp32_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule s,
                     const __grid_constant__ Rows rows) {
  using Layout = Fp32Layout<kDim>;
  extern __shared__ __align__(128) float shared[];
  Work& w = *reinterpret_cast<Work*>(shared + Layout::kWork);
  const bool has_rows = begin_work<kTileKeys>(p, s, w);
  sm90::clear_padding<float>(p);
  if (!has_rows) return;
  const int pair = static_cast<int>(threadIdx.x) / kColumns, column = static_cast<int>(threadIdx.x) % kColumns;

  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kDim; i += kTileThreads) {
    const int row = i / kDim, d = i % kDim;
    const auto [token, head, exists] = sm90::place_of_row(s, w, row);
    const int64_t q_token = static_cast<int64_t>(w.first_q_token) + w.first_token + token;
    const auto* q = static_cast<const float*>(p.q) + q_token * p.q_stride_token + head * p.q_stride_head;
    shared[Layout::kQ + row * Layout::kPitch + d] = exists && d < p.head_dim_qk ? q[d] : 0.f;
  }
  const float k_scale = p.k_scale != nullptr ? p.k_scale[w.kv_head * p.k_scale_stride] : 1.f;
  const float v_scale = p.v_scale != nullptr ? p.v_scale[w.kv_head * p.v_scale_stride] : 1.f;
  const float scale = p.softmax_scale * k_scale;
  int token[2];
  sm90::KeyRange keys[2];
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  float out[2][kDim / kColumns] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    token[h] = (2 * pair + h) * s.pack_inverse >> 16;
    keys[h] = sm90::keys_of_token(p, w, w.first_token + min_of(token[h], w.num_tokens - 1));
  }

  const Places<kTileKeys> places(p, s, rows.k, rows.v, w, reinterpret_cast<char*>(shared + Layout::kPlaces));
  float* of_keys = shared + Layout::kRows;
  float* weights = shared + Layout::kWeights + 2 * pair * Layout::kWeightPitch;
#pragma unroll 1
  for (int tile = w.tile_begin; tile < w.tile_end; ++tile) {
    places.place(tile, places.look_up(tile));
    __syncthreads();  // places are there; nobody reads the last tile's values
    load_rows<kDim>(p, rows, places.of_tile(tile), &Place::k, p.k, p.head_dim_qk, of_keys);
    __syncthreads();
    float scores[2][kTileKeys / kColumns] = {};
    const float* q = shared + Layout::kQ + 2 * pair * Layout::kPitch;
#pragma unroll 2
    for (int d = 0; d < p.head_dim_qk; d += 4) {
      float4 a[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) a[h] = *reinterpret_cast<const float4*>(q + h * Layout::kPitch + d);
#pragma unroll
      for (int j = 0; j < kTileKeys / kColumns; ++j) {
        const float4 b = *reinterpret_cast<const float4*>(of_keys + (column + kColumns * j) * Layout::kPitch + d);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& score = scores[h][j];
          score = fmaf(a[h].x, b.x, score), score = fmaf(a[h].y, b.y, score);
          score = fmaf(a[h].z, b.z, score), score = fmaf(a[h].w, b.w, score);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = largest[h];
#pragma unroll
      for (int j = 0; j < kTileKeys / kColumns; ++j) {
        const int key = w.place_of(tile) * kTileKeys + column + kColumns * j;
        float& score = scores[h][j];
        score *= scale;
        if (p.logit_cap > 0.f) score = p.logit_cap * tanhf(score / p.logit_cap);
        bool seen = key >= keys[h].begin && key < keys[h].end && token[h] < w.num_tokens;
        if (seen && p.hidden_keys != nullptr) seen = !sm90::hides(p, w, w.first_token + token[h], key);
        if (seen && p.tree_mask != nullptr) seen = sm90::tree_allows(p, w, w.first_token + token[h], key - w.draft);
        if (!seen) score = -INFINITY;
        top = fmaxf(top, score);
      }
#pragma unroll
      for (int step = 1; step < kColumns; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      const float reference = top == -INFINITY ? 0.f : top;
      const float shrink = exp2f((largest[h] - reference) * kLog2e);
      largest[h] = top;
      sum[h] *= shrink;
#pragma unroll
      for (float& value : out[h]) value *= shrink;
#pragma unroll
      for (int j = 0; j < kTileKeys / kColumns; ++j) {
        const float weight = exp2f((scores[h][j] - reference) * kLog2e);
        sum[h] += weight;
        weights[h * Layout::kWeightPitch + column + kColumns * j] = weight;
      }
    }
    __syncthreads();  // nobody reads the keys any more
    load_rows<kDim>(p, rows, places.of_tile(tile), &Place::v, p.v, p.head_dim_v, of_keys);
    __syncthreads();
#pragma unroll 2
    for (int key = 0; key < kTileKeys; ++key) {
      const float a[2] = {weights[key], weights[Layout::kWeightPitch + key]};
#pragma unroll
      for (int j = 0; j < kDim / (4 * kColumns); ++j) {
        const float4 b = *reinterpret_cast<const float4*>(of_keys + key * Layout::kPitch + 4 * (column + kColumns * j));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* o = out[h] + 4 * j;
          o[0] = fmaf(a[h], b.x, o[0]), o[1] = fmaf(a[h], b.y, o[1]);
          o[2] = fmaf(a[h], b.z, o[2]), o[3] = fmaf(a[h], b.w, o[3]);
        }
      }
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = sum[h];
#pragma unroll
    for (int step = 1; step < kColumns; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    const auto [own, head, exists] = sm90::place_of_row(s, w, 2 * pair + h);
    if (!exists) continue;
    const bool empty = total == 0.f;  // NaN is not empty: it must show
    const float lse = empty ? -INFINITY : largest[h] + logf(total);
    float factor = empty ? 0.f : v_scale / total;
    if (p.sinks != nullptr && !empty) factor /= 1.f + expf(p.sinks[head] - lse);
    const int64_t q_token = static_cast<int64_t>(w.first_q_token) + w.first_token + own;
    if (p.lse != nullptr && column == 0) p.lse[q_token * p.num_q_heads + head] = lse;
    float* to = static_cast<float*>(p.out) + q_token * p.out_stride_token + head * p.out_stride_head;
#pragma unroll
    for (int i = 0; i < kDim / kColumns; ++i) {
      const int d = 4 * (column + kColumns * (i / 4)) + i % 4;
      if (d < p.head_dim_v) to[d] = factor == 0.f ? 0.f : out[h][i] * factor;
    }
  }
}

template <int kDim>
void launch_dim(const Params& p, cudaStream_t stream) {
  const int pack = sm90::heads_per_tile(p.num_q_heads / p.num_kv_heads, p.tile_q, kTileRows);
  const Schedule s = sm90::schedule_of(p, kTileRows, pack);
  constexpr int kBytes = Fp32Layout<kDim>::kBytes;
  launch_dependent<&fmha_fp32_kernel<kDim>>("fmha", {max_of(s.num_works, 1), kTileThreads, kBytes, kBytes}, stream, p,
                                            s, make_rows(p));
}

}  // namespace

void launch_fp32(const Params& p, CUstream_st* stream) {
  if (p.num_q_tokens == 0) return;
  const int dim = max_of(p.head_dim_qk, p.head_dim_v);
  (dim <= 64 ? launch_dim<64> : dim <= 128 ? launch_dim<128> : launch_dim<256>)(p, stream);
}

}  // namespace attnops::fmha
