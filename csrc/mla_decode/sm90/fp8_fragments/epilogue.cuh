#pragma once
#include <cmath>

#include "mla_decode/sm90/fp8_fragments/cluster_merge.cuh"

// The end of a piece: both teams' sums become one, and then the output or a partial result. Of its group's 256 columns
// of V a team writes two of the four blocks of 64: team 0 the first.
namespace attnops::mla_decode::sm90::fp8_fragments {

using attnops::sm90::named_barrier_sync;

inline constexpr int kColumnTiles = 4;  // of 64 columns of V, of a group

// Leaves what all warps must know of the rows in shared memory.
template <class At>
__device__ inline void publish_rows(const Softmax<At>& rows, uint8_t* base) {
  float* sums = reinterpret_cast<float*>(rows.state(base) + At::kSums) + rows.first_row();
  float* references = reinterpret_cast<float*>(rows.state(base) + At::kReference) + rows.first_row();
  few_rows::publish_states<At>(rows.reference, rows.sum, sums, references);
}

// Where a row of the piece goes, in elements, and what each team's values are multiplied by; 0: it saw no key.
struct RowEnd {
  int64_t offset;
  float factor[2];
};
static_assert(sizeof(RowEnd) == 16);

// By one thread per row: its sum over all warps and teams, its lse, its place.
template <class At>
__device__ inline RowEnd end_of_row(const Params& p, const Piece& piece, const uint8_t* base, int row, float kv_scale) {
  const bool valid = row < piece.num_rows;
  float most = -INFINITY, sum = 0.f, factor[2];
  const auto state = [&](int team) { return base + At::kStates + team * At::kStateBytes; };
  const auto reference = [&](int team) { return reinterpret_cast<const float*>(state(team) + At::kReference)[row]; };
#pragma unroll
  for (int team = 0; team < At::kTeams; ++team) most = fmaxf(most, reference(team));
#pragma unroll
  for (int team = 0; team < At::kTeams; ++team) {
    const float* sums = reinterpret_cast<const float*>(state(team) + At::kSums) + row;
    factor[team] = rescale_factor(reference(team), most);
    float of_team = 0.f;
#pragma unroll
    for (int warp = 0; warp < At::kSumWarps; ++warp) of_team += sums[warp * At::kRows];
    sum += factor[team] * of_team;
  }
  const float lse = sum == 0.f ? -INFINITY : (most - kLift + log2f(sum)) * kLn2;  // a NaN sum goes on: it must show
  float common = sum == 0.f ? 0.f : kv_scale / sum;
  RowEnd end;
  if (At::kCluster && piece.partial >= 0) {
    end.offset = __float_as_int(sum == 0.f ? -INFINITY : most - kLift + log2f(sum));  // the reference of a sum of 1
  } else if (piece.partial >= 0) {
    const int64_t partial_row = static_cast<int64_t>(piece.partial) * kPlanRows + row;
    end.offset = partial_row * kHeadDimV;
    if (valid) p.lse_partial[partial_row] = lse;
  } else {
    const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
    end.offset = piece.request * p.out_stride_request + at.token * p.out_stride_token + at.head * p.out_stride_head;
    common *= sink_factor(p, at.head, lse);
    if (p.lse && valid) {
      p.lse[(static_cast<int64_t>(piece.request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = lse;
    }
  }
  end.factor[0] = factor[0] * common;
  end.factor[1] = factor[At::kTeams - 1] * common;
  return end;
}

template <class At>
inline constexpr int kOwnColumnTiles = kColumnTiles / At::kTeams;  // that a team writes

// A team keeps its own blocks of columns, gives the others away and adds what it gets.
template <class At>
__device__ inline void exchange_outputs(uint8_t* base, int team, const float (&o)[kColumnTiles][At::kRows / 2],
                                        float (&total)[kOwnColumnTiles<At>][At::kRows / 2]) {
  constexpr int kCount = At::kRows / 2, kOwnTiles = kOwnColumnTiles<At>;
  constexpr int kVecs = kCount / 4;
  float4* const outputs = reinterpret_cast<float4*>(base + At::kOutputs);
#pragma unroll
  for (int m = 0; m < kOwnTiles; ++m) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[m][i] = team == 0 ? o[m][i] : o[kOwnTiles + m][i];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const auto given = [&](int i) { return team == 0 ? o[kOwnTiles + m][4 * v + i] : o[m][4 * v + i]; };
      outputs[(m * kVecs + v) * At::kConsumerThreads + threadIdx.x] = {given(0), given(1), given(2), given(3)};
    }
  }
  named_barrier_sync(kAll, At::kConsumerThreads);
#pragma unroll
  for (int m = 0; m < kOwnTiles; ++m) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const float4 x = outputs[(m * kVecs + v) * At::kConsumerThreads + (threadIdx.x ^ kTeamThreads)];
      total[m][4 * v] += x.x;
      total[m][4 * v + 1] += x.y;
      total[m][4 * v + 2] += x.z;
      total[m][4 * v + 3] += x.w;
    }
  }
}

// In a block of 64 columns, a thread has columns 16 warp + 2 (lane / 4) + h: element 4 j + 2 h + e. `store` gets a
// row's place at the first block, the block's distance from there, and two neighbouring values.
template <class At, typename Store>
__device__ inline void for_columns(const Piece& piece, const Place& place, const RowEnd* ends,
                                   const float (&total)[kOwnColumnTiles<At>][At::kRows / 2], const Store& store) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  const int column = place.group * 256 + place.team * 64 * kOwnColumnTiles<At> + 16 * warp + lane / 4 * 2;
#pragma unroll
  for (int i = 0; i < At::kQueries; ++i) {
    if (query_of(i) >= piece.num_rows) continue;
    const int64_t at = ends[query_of(i)].offset + column;
#pragma unroll
    for (int m = 0; m < kOwnColumnTiles<At>; ++m) {
      store(at + 64 * m, total[m][element_of(i, 0)], total[m][element_of(i, 1)]);
    }
  }
}

// This code runs once a piece, on a cold instruction cache: it is kept short.
template <typename T, class At>
__device__ inline void finish_piece(const Params& p, const Piece& piece, const Place& place, uint8_t* base,
                                    float kv_scale, bool out_aligned, float (&o)[kColumnTiles][At::kRows / 2]) {
  RowEnd* ends = reinterpret_cast<RowEnd*>(base + At::kRowEnds);
  named_barrier_sync(kAll, At::kConsumerThreads);
  if (At::kCluster && piece.partial >= 0) {
    attnops::sm90::cluster_wait();            // all CTAs have their barriers
    attnops::sm90::cluster_arrive_relaxed();  // the ring is free for what others send
  }
  if (threadIdx.x < At::kRows) ends[threadIdx.x] = end_of_row<At>(p, piece, base, threadIdx.x, kv_scale);
  named_barrier_sync(kAll, At::kConsumerThreads);
#pragma unroll
  for (int i = 0; i < At::kQueries; ++i) {
    const float factor = ends[query_of(i)].factor[place.team];
    const bool empty = factor == 0.f;  // what sees nothing may hold 0 x NaN
#pragma unroll
    for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = o[m][element_of(i, h)];
        x = empty ? 0.f : x * factor;
      }
    }
  }
  float total[kOwnColumnTiles<At>][At::kRows / 2];
  exchange_outputs<At>(base, place.team, o, total);
  if constexpr (At::kCluster) {
    if (piece.partial >= 0) {
      float reference = 0.f, sum = 0.f;
      if (threadIdx.x < At::kRows) {
        reference = __int_as_float(static_cast<int>(ends[threadIdx.x].offset));
        sum = reference == -INFINITY ? 0.f : 1.f;
      }
      typename ClusterMerge<T, At>::Vectors own;
#pragma unroll
      for (int v = 0; v < 2 * kOwnColumnTiles<At>; ++v) {
        const float* x = total[v / 2] + v % 2 * 4;
        own[v] = make_float4(x[0], x[1], x[2], x[3]);
      }
      attnops::sm90::cluster_wait();
      ClusterMerge<T, At>(p, piece, piece.partial, base, attnops::sm90::smem_address(base))
          .run(sum, reference, own, out_aligned);
      return;
    }
  }
  if (piece.partial >= 0) {
    for_columns<At>(piece, place, ends, total,
                    [&](int64_t at, float x, float y) { *reinterpret_cast<float2*>(p.out_partial + at) = {x, y}; });
    return;
  }
  T* const out = static_cast<T*>(p.out);
  if (out_aligned) {
    for_columns<At>(piece, place, ends, total, [&](int64_t at, float x, float y) {
      *reinterpret_cast<uint32_t*>(out + at) = attnops::sm90::pack_pair<T>(x, y);
    });
  } else {
    for_columns<At>(piece, place, ends, total, [&](int64_t at, float x, float y) {
      const uint32_t pair = attnops::sm90::pack_pair<T>(x, y);
      out[at] = reinterpret_cast<const T*>(&pair)[0];
      out[at + 1] = reinterpret_cast<const T*>(&pair)[1];
    });
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
