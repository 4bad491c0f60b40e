#pragma once
#include "device/common/semaphore.cuh"
#include "device/sm80/mma.cuh"
#include "fmha/sm90/partial.cuh"

namespace attnops::fmha::sm90 {

inline constexpr int kMergeBarrier = 12;

// Of all warps that compute.
template <class Tr>
__device__ __forceinline__ void merge_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kMergeBarrier), "n"(32 * Tr::kComputeWarps) : "memory");
}

// A row that is merged: the sum of its pieces, and of their weights beside the largest log-sum-exp.
template <class Tr>
__device__ __forceinline__ void store_merged(const Params& p, const Work& w, const RowPlace& place, float largest,
                                             float total, const float4 (&own)[ceil_div(Tr::kHeadDimV, 128)]) {
  const int lane = threadIdx.x % 32;
  const bool empty = total == 0.f;
  const float lse = empty ? -INFINITY : largest + logf(total);
  float factor = empty ? 0.f : 1.f / total;
  if (p.sinks != nullptr && !empty) factor /= 1.f + expf(p.sinks[place.head] - lse);
  const int64_t q_token = static_cast<int64_t>(w.first_q_token) + w.first_token + place.token;
  if (p.lse != nullptr && lane == 0) p.lse[q_token * p.num_q_heads + place.head] = lse;
  typename Tr::Out* out =
      static_cast<typename Tr::Out*>(p.out) + q_token * p.out_stride_token + place.head * p.out_stride_head;
#pragma unroll
  for (int part = 0; part < ceil_div(Tr::kHeadDimV, 128); ++part) {
    if (part * 128 + lane * 4 < p.head_dim_v) {
      const float4 x = own[part];
      const uint2 packed{pack2<typename Tr::Out>(x.x * factor, x.y * factor),
                         pack2<typename Tr::Out>(x.z * factor, x.w * factor)};
      *reinterpret_cast<uint2*>(out + part * 128 + lane * 4) = packed;
    }
  }
}

// Where a warp has several rows of a cut tile, it merges `kCount` at once, which then wait for the same reads. Machine
// code is short: each instruction runs a few times at most, and most of its time is until it is there.
template <class Tr, int kCount>
__device__ __forceinline__ void merge_rows(const Params& p, const Schedule& s, const Work& w, int first_row, int step,
                                           int end_row, int first_slab, int stride, int pieces) {
  constexpr int kParts = ceil_div(Tr::kHeadDimV, 128);
  const int lane = threadIdx.x % 32;
  const float* lses = partial_lse<Tr::kRows>(p, s);
  float4 own[kCount][kParts] = {};
  float largest[kCount], total[kCount] = {};
  int64_t at[kCount];  // of the first piece
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    at[i] = int64_t{first_slab} * Tr::kRows + min_of(first_row + i * step, end_row - 1);
    largest[i] = -INFINITY;
  }
  const int64_t piece_rows = int64_t{stride} * Tr::kRows;
#pragma unroll 1
  for (int j = lane; j < pieces; j += 32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest[i] = fmaxf(largest[i], __ldcg(lses + at[i] + j * piece_rows));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], distance));
    }
  }
#pragma unroll 2
  for (int j = 0; j < pieces; ++j) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float weight = expf(__ldcg(lses + at[i] + j * piece_rows) - (largest[i] == -INFINITY ? 0.f : largest[i]));
      total[i] += weight;
      const float4* from = reinterpret_cast<const float4*>(p.partial + (at[i] + j * piece_rows) * p.head_dim_v) + lane;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part * 128 + lane * 4 < p.head_dim_v) {
          const float4 x = __ldcg(from + part * 32);
          own[i][part].x = fmaf(weight, x.x, own[i][part].x);
          own[i][part].y = fmaf(weight, x.y, own[i][part].y);
          own[i][part].z = fmaf(weight, x.z, own[i][part].z);
          own[i][part].w = fmaf(weight, x.w, own[i][part].w);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = first_row + i * step;
    const RowPlace place = place_of_row(s, w, row);
    if (row < end_row && place.exists) store_merged<Tr>(p, w, place, largest[i], total[i], own[i]);
  }
}

// Row `row` of a cut tile from its pieces, whose slabs are `stride` apart. `warps` warps share it, each with pieces of
// its own. They add up in `sums`, [warps][head_dim_v] in shared memory, in the order of the pieces. Without a row, a
// warp only keeps the others company.
template <class Tr>
__device__ __forceinline__ void merge_row(const Params& p, const Schedule& s, const Work& w, int row, int first_slab,
                                          int stride, int pieces, int warps, int warp, float* sums) {
  constexpr int kParts = ceil_div(Tr::kHeadDimV, 128);
  const int lane = threadIdx.x % 32;
  const RowPlace place = place_of_row(s, w, max_of(row, 0));
  const bool exists = row >= 0 && place.exists;
  float4 own[kParts] = {};
  float largest = -INFINITY, total = 0.f;
  if (exists) {
    // Other SMs wrote them: past L1.
    const float* lses = partial_lse<Tr::kRows>(p, s);
    const auto at = [&](int piece) { return (first_slab + static_cast<int64_t>(piece) * stride) * Tr::kRows + row; };
    for (int i = lane; i < pieces; i += 32) largest = fmaxf(largest, __ldcg(lses + at(i)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const float reference = largest == -INFINITY ? 0.f : largest;
    const int begin = pieces * warp / warps, end = pieces * (warp + 1) / warps;
    for (int base = 0; base < pieces; base += 32) {
      const float lse = base + lane < pieces ? __ldcg(lses + at(base + lane)) : -INFINITY;
      const float own_weight = expf(lse - reference);  // NaN stays
      float weights = own_weight;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) weights += __shfl_xor_sync(0xffffffffu, weights, step);
      total += weights;
#pragma unroll 8
      for (int i = max_of(begin - base, 0); i < min_of(end - base, 32); ++i) {
        const float weight = __shfl_sync(0xffffffffu, own_weight, i);
        const float4* from = reinterpret_cast<const float4*>(p.partial + at(base + i) * p.head_dim_v);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (part * 128 + lane * 4 < p.head_dim_v) {
            const float4 x = __ldcg(from + part * 32 + lane);
            own[part].x = fmaf(weight, x.x, own[part].x);
            own[part].y = fmaf(weight, x.y, own[part].y);
            own[part].z = fmaf(weight, x.z, own[part].z);
            own[part].w = fmaf(weight, x.w, own[part].w);
          }
        }
      }
    }
  }
  if (warps > 1) {
    float4* const parts = reinterpret_cast<float4*>(sums) + warp * (Tr::kHeadDimV / 4);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part * 128 + lane * 4 < Tr::kHeadDimV) parts[part * 32 + lane] = own[part];
    }
    merge_barrier<Tr>();
    for (int other = 1; warp == 0 && other < warps; ++other) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part * 128 + lane * 4 < Tr::kHeadDimV) {
          const float4 x = parts[other * (Tr::kHeadDimV / 4) + part * 32 + lane];
          own[part].x += x.x;
          own[part].y += x.y;
          own[part].z += x.z;
          own[part].w += x.w;
        }
      }
    }
    merge_barrier<Tr>();
  }
  if (!exists || warp != 0) return;
  store_merged<Tr>(p, w, place, largest, total, own);
}

// Waits until so many warps have stored their rows. Pieces take milliseconds: a counter that stands still for seconds
// was written by somebody else, and will never be there.
__device__ inline void wait_for_pieces(const int32_t* counter, uint32_t needed) {
  constexpr int kPatience = 1 << 23;  // looks of half a microsecond and more
  uint32_t done = load_acquire(counter);
  for (int looks = 0; done < needed && looks < kPatience; ++looks) {
    const uint32_t seen = load_acquire(counter);
    if (seen != done) looks = 0;
    done = seen;
  }
}

// When a CTA finds no more works, others may still compute: all pieces belong to CTAs that run, which wait for nothing.
// Each CTA waits for them and merges its part: piece number i of n merges the i-th part of the tile's rows. Called by
// all computing threads of a plan with `pieces`; `shared` is memory that nobody needs any more.
template <class Tr>
__device__ __forceinline__ void merge_pieces(const Params& p, const Schedule& s, int pieces, char* shared) {
  constexpr int kWarps = Tr::kComputeWarps;
  const int slabs = pieces * s.works_per_tile, warp = static_cast<int>(threadIdx.x) / 32 - Tr::kFirstComputeWarp;
  if (threadIdx.x == 32 * Tr::kFirstComputeWarp) {
    wait_for_pieces(p.semaphores + 2, static_cast<uint32_t>(slabs) * kWarps);
    leave(p);
  }
  merge_barrier<Tr>();
  for (int slab = static_cast<int>(blockIdx.x); slab < slabs; slab += static_cast<int>(gridDim.x)) {
    Work w;
    decode_piece<Tr::kKeys, Tr::kPlainWorks>(p, s, slab, w);
    if (w.num_tokens <= 0) continue;
    const int piece = slab / s.works_per_tile;
    const int2 place =
        *reinterpret_cast<const int2*>(p.pieces + 4 * (piece + 1ll) + 2);  // piece of the tile, of how many
    if (place.x > piece || place.y > pieces - (piece - place.x)) continue;
    const int first_slab = slab - place.x * s.works_per_tile;
    const int rows = w.num_tokens * s.pack;  // the tile's first ones
    const int begin = rows * place.x / place.y, end = rows * (place.x + 1) / place.y;
    const int together = clamp(kWarps / max_of(end - begin, 1), 1, min_of(kWarps, place.y)),
              at_once = kWarps / together;
    const int team = warp / together;
    if (Tr::kMergesTogether && end - begin > kWarps) {
      constexpr int kAtOnce = Tr::kHeadDimV > 128 ? 2 : 4;
#pragma unroll 1
      for (int first = begin + warp; first < end; first += kAtOnce * kWarps) {
        merge_rows<Tr, kAtOnce>(p, s, w, first, kWarps, end, first_slab, s.works_per_tile, place.y);
      }
      continue;
    }
    float* const sums = reinterpret_cast<float*>(shared) + team * together * Tr::kHeadDimV;
    for (int first = begin; first < end; first += at_once) {
      const int row = team < at_once && first + team < end ? first + team : -1;
      merge_row<Tr>(p, s, w, row, first_slab, s.works_per_tile, place.y, together, warp % together, sums);
    }
  }
}

}  // namespace attnops::fmha::sm90
