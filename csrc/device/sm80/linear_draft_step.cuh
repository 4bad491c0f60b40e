#pragma once
#include "device/common/linear_commit.cuh"
#include "device/common/semaphore.cuh"
#include "device/sm80/linear_verify_drafts.cuh"

// What a verification does of the commit before it, so that both are one launch. A CTA has all rows of a head, and asks
// for its state once: where the ring is folded, the state is folded in shared memory, written, and then verified. All
// else is a matter of who writes when. A head's updates and decays are its CTA's alone. Keys belong to the heads of a
// group, and a ring's length to all heads of a request: the last of those CTAs writes, when all have read.
namespace attnops {

// What the drafts come behind.
struct TileRing {
  int before, more;  // rows that count, and accepted drafts that come to them
  bool folds;
  int length;  // of the ring that the drafts are written behind

  __device__ int rows() const { return before + more; }
};

__device__ __forceinline__ const LinearVerify& verification(const LinearVerify& p) { return p; }
__device__ __forceinline__ const LinearVerify& verification(const LinearDraftStep& p) { return p.verify; }

__device__ __forceinline__ TileRing tile_ring(const LinearVerify& p, int64_t slot, int /*request*/) {
  const int length = p.rings.length(slot, p.drafts);
  return {.before = length, .more = 0, .folds = false, .length = length};
}
__device__ __forceinline__ TileRing tile_ring(const LinearDraftStep& p, int64_t slot, int request) {
  const LinearCommit commit = p.commit();
  const int more = commit.num_accepted(request), length = p.verify.rings.length(slot, p.verify.drafts);
  const bool folds = commit.folds(length, more);
  return {.before = length, .more = more, .folds = folds && length + more > 0, .length = folds ? 0 : length + more};
}

template <bool kDelta>
__device__ __forceinline__ void check_drafts(const LinearVerify& p, int request, int32_t* report) {
  p.check(kDelta ? kReportDeltaVerify : kReportSsdVerify, request, report);
}
template <bool kDelta>
__device__ __forceinline__ void check_drafts(const LinearDraftStep& p, int request, int32_t* report) {
  p.commit().check(kDelta ? kReportDeltaDraftStep : kReportSsdDraftStep, request, report);
}

// Where a ring's updates are. A ring that is folded may have more rows than one that stays: factors, which are made
// behind a fold, have room for those.
__device__ __forceinline__ float* tile_updates(const VerifyTileLayout& at, float* shared, int row) {
  return row < at.rows_before ? shared + at.values() + row * at.cta_rows
                              : shared + at.factors() + (row - at.rows_before) * at.cta_rows;
}

// A ring that is folded: its keys under the decays behind them, by one warp, and where the drafts' products will be the
// decays of all rows, [key] of each kCommitRows rows. As FoldRing, with the same bits.
template <bool kChannels>
__device__ __forceinline__ void scale_ring(const VerifyTileLayout& at, float* shared, int rows) {
  const int lane = threadIdx.x % 32;
  float *keys = shared + at.row_keys() + 4 * lane, *all = shared + at.products();
  const float* decays = shared + at.decays();
  for (int first = 0; first < rows; first += kCommitRows, all += kTileKeys) {
    const int some = min_of(rows - first, kCommitRows);
    const auto scale = [&](int i, float4 by) {
      float4& key = *reinterpret_cast<float4*>(keys + (first + i) * kTileStride);
      key = make_float4(by.x * key.x, by.y * key.y, by.z * key.z, by.w * key.w);
    };
    if constexpr (kChannels) {
      float4 behind = make_float4(1.f, 1.f, 1.f, 1.f);
      for (int i = some - 1; i >= 0; --i) {
        scale(i, behind);
        const float4 own = *reinterpret_cast<const float4*>(decays + (first + i) * kTileKeys + 4 * lane);
        behind = make_float4(behind.x * own.x, behind.y * own.y, behind.z * own.z, behind.w * own.w);
      }
      *reinterpret_cast<float4*>(all + 4 * lane) = behind;
    } else {
      float behind = lane < some ? decays[first + lane] : 1.f;
#pragma unroll
      for (int distance = 1; distance < kCommitRows; distance *= 2) {  // of this row and those behind it
        const float more = __shfl_down_sync(0xffffffffu, behind, distance);
        if (lane + distance < 32) behind *= more;
      }
      for (int i = 0; i < some; ++i) {
        const float after = __shfl_sync(0xffffffffu, behind, min_of(i + 1, 31)), by = i + 1 < some ? after : 1.f;
        scale(i, make_float4(by, by, by, by));
      }
      const float own = __shfl_sync(0xffffffffu, behind, 0);
      *reinterpret_cast<float4*>(all + 4 * lane) = make_float4(own, own, own, own);
    }
  }
}

// Four columns of a state's row.
template <typename State>
using FoldVec = Vec<State, 4>;

// A warp's 16 rows of a state after their ring, in shared memory and in the pool. A lane has four columns of each.
template <typename State>
__device__ __forceinline__ void fold_tile(const LinearStep& step, const VerifyTileLayout& at, float* shared, int rows,
                                          int64_t slot, int head, int first_row) {
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kTileRows;
  State* states = static_cast<State*>(step.states) + state_at(step, slot, head) + 4 * lane;
  const float* keys = shared + at.row_keys() + 4 * lane;
#pragma unroll 1
  for (int part = first; part < first + kTileRows; part += kAtOnce) {
    const auto place = [&](int r) {
      return reinterpret_cast<State*>(shared + (part + r) * at.state_stride) + 4 * lane;
    };
    float state[kAtOnce][4];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const auto vec = load_vec<RowVec<State, 4>>(place(r));
#pragma unroll
      for (int e = 0; e < 4; ++e) state[r][e] = vec.at(e);
    }
    for (int row = 0; row < rows; ++row) {
      if (row % kCommitRows == 0) {
        float decays[4];
        load_shared(decays, shared + at.products() + row / kCommitRows * kTileKeys + 4 * lane);
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) state[r][e] *= decays[e];
        }
      }
      float key[4], updates[2][4];
      load_shared(key, keys + row * kTileStride);
      const float* from = tile_updates(at, shared, row) + part;
      load_shared(updates[0], from);
      load_shared(updates[1], from + 4);
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[r][e] = fmaf(updates[r / 4][r % 4], key[e], state[r][e]);
      }
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      FoldVec<State> vec;
#pragma unroll
      for (int e = 0; e < 4; ++e) vec.data[e] = to_state<State>(state[r][e]);
      store_vec(place(r), vec);
      if (first_row + part + r >= step.value_dim) continue;
      State* to = states + int64_t{first_row + part + r} * step.stride_row;
      if constexpr (sizeof(State) == 4) {
        store_state<true>(to, vec);
      } else {
        __stcs(reinterpret_cast<uint2*>(to), *reinterpret_cast<const uint2*>(&vec));
      }
    }
  }
}

// What is behind the step in a ring: rows of drafts that count go where they belong, and the drafts' own behind them.
// By one warp, when the CTA has read its ring.
template <bool kChannels>
__device__ __forceinline__ void keep_rows(const LinearDraftStep& p, const VerifyTileLayout& at, float* shared,
                                          const TileRing& ring, int own_draft, int64_t slot, int head, int request) {
  const LinearVerify& verify = p.verify;
  const LinearStep& step = verify.step;
  const StateRings& rings = verify.rings;
  const int lane = threadIdx.x % 32, kept = ring.folds ? 0 : ring.more;
  const bool moves = __any_sync(0xffffffffu, lane < kept && own_draft != lane);
  const auto copy = [&](float* to, const float* from, int count) {
    for (int c = 4 * lane; c < count; c += 4 * 32) {
      *reinterpret_cast<float4*>(to + c) = *reinterpret_cast<const float4*>(from + c);
    }
  };
  const auto keep = [&](const auto& one) {  // each new row, and where it lies in shared memory
    for (int i = 0; i < kept; ++i) {
      const int draft = __shfl_sync(0xffffffffu, own_draft, i);
      if (draft != i) one(ring.before + i, ring.before + i);
    }
    for (int d = 0; d < at.drafts; ++d) one(ring.length + d, at.rows_before + d);
  };
  // First of all, so that the answer comes while rows are written. Keys of a chain lie behind all that any head reads.
  // Else the group's last head writes them.
  const int of_group = step.heads_per_group, group = head / of_group;
  const bool shares = of_group > 1 && (ring.folds || moves);
  int32_t* own = p.semaphores + int64_t{request} * (rings.num_groups + 1);
  const auto last_of = [](int32_t* semaphore, int count) {
    const bool last = add_acq_rel(semaphore, 1) == static_cast<unsigned>(count - 1);
    if (last) *semaphore = 0;
    return last;
  };
  bool writes = head % of_group == 0;
  __syncwarp();
  if (lane == 0) {
    if (shares) writes = last_of(own + 1 + group, of_group);
    if (last_of(own, step.num_heads)) rings.lengths[slot] = ring.length;
  }
  if (shares) writes = __any_sync(0xffffffffu, lane == 0 && writes);
  __syncwarp();
  keep([&](int row, int from) {
    if constexpr (kChannels) {
      copy(rings.decay_row(step, slot, head, row), shared + at.decays() + from * kTileKeys, kTileKeys);
    } else if (lane == 0) {
      *rings.decay_row(step, slot, head, row) = shared[at.decays() + from];
    }
  });
  for (int i = 0; moves && i < kept; ++i) {
    const int draft = __shfl_sync(0xffffffffu, own_draft, i), row = ring.before + i;
    if (draft != i) copy(rings.u_row(step, slot, head, row), tile_updates(at, shared, row), step.value_dim);
  }
  if (!writes) return;
  keep([&](int row, int from) {
    copy(rings.k_row(step, slot, head, row), shared + at.row_keys() + from * kTileStride, kTileKeys);
  });
}

}  // namespace attnops
