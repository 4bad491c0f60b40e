#pragma once
#include "device/sm90/cluster.cuh"
#include "mla_decode/sm90/fp8_fragments/layout.h"
#include "mla_decode/sm90/fp8_fragments/softmax.cuh"

// The merge of a work whose pieces are the CTAs of a cluster, without memory and without a kernel of its own. Each warp
// that has accumulators sends them in units, vectors of four of each lane: unit u to CTA u % pieces, which adds up what
// all pieces have of it. Who calls has seen to it that the place of what comes is free in all CTAs.
namespace attnops::mla_decode::sm90::fp8_fragments {

// Of 16 rows, 512 columns and kWarps warps. Vector v of a warp: block v / 2 of its blocks of 64 columns, rows from
// 8 (v % 2) on; elements 2 h + e are columns 2 (lane / 4) + h and rows 2 (lane % 4) + e.
template <typename T, class At>
class ClusterMerge {
  static constexpr int kWarps = At::kMergeWarps, kTeams = kWarps / 8, kVecs = 8 / kTeams, kUnits = kWarps * kVecs;
  static constexpr int kUnitBytes = 32 * 16;
  static_assert(At::kRows == 16 && kUnits == kClusterUnits);

 public:
  using Vectors = float4[kVecs];

  __device__ ClusterMerge(const Params& p, const Piece& piece, int pieces, const uint8_t* base, uint32_t shared)
      : p_(p),
        piece_(piece),
        base_(base),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        pieces_(pieces),
        rank_(attnops::sm90::cluster_rank()) {}

  // By all that have accumulators. `sum` and `reference`, of threads that have a row: of its probabilities, 0 where it
  // saw no key, and what their exponents are relative to.
  __device__ void run(float sum, float reference, const Vectors& own, bool out_aligned) const {
    const uint32_t arrived = shared_ + At::kMergeBarrier;
    const int units = (kUnits - rank_ + pieces_ - 1) / pieces_;
    if (threadIdx.x == 0) {
      attnops::sm90::mbarrier_arrive_expect(arrived, pieces_ * (units * kUnitBytes + At::kRows * 8));
    }
    if (threadIdx.x < At::kRows) {
      const uint32_t place = shared_ + row_place(rank_, threadIdx.x);
#pragma unroll 1
      for (int to = 0; to < pieces_; ++to) {
        attnops::sm90::store_async(attnops::sm90::address_in(place, to), make_float2(reference, sum),
                                   attnops::sm90::address_in(arrived, to));
      }
    }
    int number = warp_ / pieces_, to = warp_ - number * pieces_;
    const int step = kWarps / pieces_, rest = kWarps - step * pieces_;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      attnops::sm90::store_async(attnops::sm90::address_in(shared_ + vector_place(rank_, number), to), own[v],
                                 attnops::sm90::address_in(arrived, to));
      number += step, to += rest;
      if (to >= pieces_) ++number, to -= pieces_;
    }
    attnops::sm90::mbarrier_wait_cluster(arrived, 0);
#pragma unroll 1
    for (int i = warp_; i < units; i += kWarps) merge(i, out_aligned);
  }

 private:
  __device__ static int row_place(int piece, int row) { return At::kReceived + (piece * At::kRows + row) * 8; }
  // Of the CTA's unit `number`.
  __device__ int vector_place(int piece, int number) const {
    constexpr int kVectors = At::kReceived + kMostInCluster * At::kRows * 8;
    return kVectors + (number * pieces_ + piece) * kUnitBytes + lane_ * 16;
  }

  __device__ void merge(int number, bool out_aligned) const {
    const int unit = number * pieces_ + rank_, warp = unit % kWarps, v = unit / kWarps;
    const int first_row = v % 2 * 8 + lane_ % 4 * 2;
    float4 state[kMostInCluster], x[kMostInCluster];  // reference and sum of both rows
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {}, value[2][2] = {};
#pragma unroll
    for (int i = 0; i < kMostInCluster; ++i) {
      state[i] = x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (i >= pieces_) continue;
      state[i] = *reinterpret_cast<const float4*>(base_ + row_place(i, first_row));
      x[i] = *reinterpret_cast<const float4*>(base_ + vector_place(i, number));
      if (state[i].y != 0.f) most[0] = fmaxf(most[0], state[i].x);
      if (state[i].w != 0.f) most[1] = fmaxf(most[1], state[i].z);
    }
#pragma unroll
    for (int i = 0; i < kMostInCluster; ++i) {
      if (state[i].y != 0.f) {  // else there may be 0 x NaN
        const float weight = exp2_fast(state[i].x - most[0]);
        sum[0] += weight * state[i].y, value[0][0] += weight * x[i].x, value[0][1] += weight * x[i].z;
      }
      if (state[i].w != 0.f) {
        const float weight = exp2_fast(state[i].z - most[1]);
        sum[1] += weight * state[i].w, value[1][0] += weight * x[i].y, value[1][1] += weight * x[i].w;
      }
    }
    const int block = warp / 8 * (4 / kTeams) + v / 2;  // of the 256 columns of a group of four warps
    const int column = warp / 4 % 2 * 256 + block * 64 + warp % 4 * 16 + lane_ / 4 * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (first_row + e >= piece_.num_rows) continue;
      const int head = piece_.first_row + first_row + e;
      const float lse = sum[e] == 0.f ? -INFINITY : (most[e] + log2f(sum[e])) * kLn2;  // a NaN sum must show
      const float factor = sum[e] == 0.f ? 0.f : __fdividef(sink_factor(p_, head, lse), sum[e]);
      const uint32_t pair = attnops::sm90::pack_pair<T>(value[e][0] * factor, value[e][1] * factor);
      T* const to =
          static_cast<T*>(p_.out) + piece_.request * p_.out_stride_request + head * p_.out_stride_head + column;
      if (out_aligned) {
        *reinterpret_cast<uint32_t*>(to) = pair;
      } else {
        to[0] = reinterpret_cast<const T*>(&pair)[0];
        to[1] = reinterpret_cast<const T*>(&pair)[1];
      }
      if (p_.lse && column == 0) p_.lse[static_cast<int64_t>(piece_.request) * p_.num_q_heads + head] = lse;
    }
  }

  const Params& p_;
  const Piece& piece_;
  const uint8_t* const base_;
  const uint32_t shared_;
  const int lane_, warp_, pieces_, rank_;
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
