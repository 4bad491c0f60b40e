#pragma once
#include "core/linear_verify.h"
#include "device/common/arch.h"
#include "device/common/block_scan.cuh"
#include "device/common/linear_token.cuh"

// Accepted drafts: rows of a ring move to those that count, or all of them go into the state, one after another as
// decoding takes them.
namespace attnops {

inline constexpr int kCommitThreads = kStepThreads;
inline constexpr int kCommitRows = 16;  // of a ring, in shared memory at a time
inline constexpr int kCommitCtas = 16;  // an SM, at most; more than stay at once

// A request's ring, and how far it reaches after the commit.
struct CommitRows {
  int64_t slot = -1;
  int length = 0, more = 0;

  CommitRows() = default;
  __device__ CommitRows(const LinearCommit& p, int64_t request) {
    const int64_t own = p.step.state_indices[request];
    if (own < 0 || own >= p.step.num_slots) return;
    slot = own;
    length = p.rings.length(slot, p.drafts);
    more = p.num_accepted(request);
  }
  __device__ bool folds(const LinearCommit& p) const { return p.folds(length, more); }
  __device__ int at(const LinearCommit& p, int64_t request, int i) const {
    return i < length ? i : p.draft_row(request, length, i - length);
  }
  // Units of work: a block of a head's rows where the ring is folded, a head where rows move.
  __device__ int units(const LinearCommit& p, int64_t request, int row_blocks) const {
    if (slot < 0) return 0;
    if (folds(p)) return length + more > 0 ? p.step.num_heads * row_blocks : 0;
    bool moves = false;  // without a branch, so that no read waits for another
#pragma unroll 4
    for (int i = 0; i < more; ++i) moves = moves || p.draft_row(request, length, i) != length + i;
    return moves ? p.step.num_heads : 0;
  }
};

// A unit of work, found by all threads: most requests have none.
struct CommitUnit {
  CommitRows rows;
  int request, index;  // index: of the request's units
};

__device__ __forceinline__ bool find_unit(const LinearCommit& p, int unit, int row_blocks, CommitUnit& found) {
  constexpr int kOwn = 4;
  for (int first = 0; first < p.step.batch_size; first += kOwn * kCommitThreads) {
    CommitRows rows[kOwn];
    int units[kOwn], sum = 0, before;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int request = first + kOwn * static_cast<int>(threadIdx.x) + i;
      if (request < p.step.batch_size) rows[i] = CommitRows(p, request);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      units[i] = rows[i].units(p, first + kOwn * static_cast<int>(threadIdx.x) + i, row_blocks);
      sum += units[i];
    }
    const int total = block_exclusive_sum<kCommitThreads>(sum, &before);
    if (unit < total) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (unit >= before && unit < before + units[i]) {
          found.rows = rows[i];
          found.request = first + kOwn * static_cast<int>(threadIdx.x) + i;
          found.index = unit - before;
        }
        before += units[i];
      }
      __syncthreads();
      return true;
    }
    unit -= total;
  }
  return false;
}

// Accepted rows of a head to where the ring goes on.
__device__ __forceinline__ void move_rows(const LinearCommit& p, const CommitRows& rows, int request, int head) {
  const LinearStep& step = p.step;
  for (int i = rows.length; i < rows.length + rows.more; ++i) {  // rising, so that no row is lost before it has moved
    const int from = rows.at(p, request, i);
    if (from == i) continue;
    const auto move = [&](float* to, const float* source, int count) {
      for (int c = threadIdx.x; c < count; c += kCommitThreads) to[c] = source[c];
    };
    move(p.rings.u_row(step, rows.slot, head, i), p.rings.u_row(step, rows.slot, head, from), step.value_dim);
    move(p.rings.decay_row(step, rows.slot, head, i), p.rings.decay_row(step, rows.slot, head, from),
         p.rings.per_channel ? step.key_dim : 1);
    if (head % step.heads_per_group == 0) {
      move(p.rings.k_row(step, rows.slot, head, i), p.rings.k_row(step, rows.slot, head, from), step.key_dim);
    }
    // A path may name a row that an earlier one has overwritten only where it does not rise, which is an error.
  }
}

// CTAs take units in turns.
template <typename State, int kMaxKeys, bool kVectors>
__global__ void __launch_bounds__(kCommitThreads)
    linear_commit_kernel(const __grid_constant__ LinearCommit p, ReportOp op, int row_blocks) {
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kCommitThreads / kLanes;
  using Part = RowPart<State, kLanes>;
  constexpr int kCtaRows = kGroups * kStepRows;
  alignas(16) __shared__ float keys[kCommitRows][kMaxKeys], decays[kCommitRows][kMaxKeys];
  __shared__ float updates[kCommitRows][kCtaRows];
  __shared__ int from[kCommitRows];
  __shared__ CommitUnit unit;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  if (step.report != nullptr && threadIdx.x == 0) {
    for (int request = blockIdx.x; request < step.batch_size; request += gridDim.x) p.check(op, request, step.report);
  }
  const bool channels = p.rings.per_channel;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  for (int turn = blockIdx.x; find_unit(p, turn, row_blocks, unit); turn += gridDim.x) {
    const CommitRows rows = unit.rows;
    const int request = unit.request;
    if (!rows.folds(p)) {
      move_rows(p, rows, request, unit.index);
      continue;
    }
    const int head = unit.index / row_blocks, first_row = unit.index % row_blocks * kCtaRows;
    const int count = rows.length + rows.more;
    State* states = static_cast<State*>(step.states) + state_at(step, rows.slot, head);
    float state[kStepRows][kLaneElements];
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
      const int row = first_row + group + r * kGroups;
      Part::template load<kVectors>(state[r], states + int64_t{row} * step.stride_row, lane,
                                    row < step.value_dim ? step.key_dim : 0);
    }
    for (int first = 0; first < count; first += kCommitRows) {
      const int some = min_of(count - first, kCommitRows);
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < some) from[threadIdx.x] = rows.at(p, request, first + threadIdx.x);
      __syncthreads();
#pragma unroll 4
      for (int i = threadIdx.x; i < some * kCtaRows; i += kCommitThreads) {
        const int row = first_row + i % kCtaRows;
        updates[i / kCtaRows][i % kCtaRows] =
            row < step.value_dim ? p.rings.u_row(step, rows.slot, head, from[i / kCtaRows])[row] : 0.f;
      }
#pragma unroll 4
      for (int i = threadIdx.x; i < some * kMaxKeys; i += kCommitThreads) {
        const int c = i % kMaxKeys, own = from[i / kMaxKeys];
        const bool inside = c < step.key_dim;
        keys[i / kMaxKeys][c] = inside ? p.rings.k_row(step, rows.slot, head, own)[c] : 0.f;
        decays[i / kMaxKeys][c] = inside ? p.rings.decay_row(step, rows.slot, head, own)[channels ? c : 0] : 0.f;
      }
      __syncthreads();
      for (int i = 0; i < some; ++i) {
        float update[kStepRows];
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) update[r] = updates[i][group + r * kGroups];
#pragma unroll
        for (int j = 0; j < Part::kVecs; ++j) {
          constexpr int kVec = Part::kVec;
          float some_keys[kVec], some_decays[kVec];
          load_shared(some_keys, keys[i] + Part::column(lane, j * kVec));
          load_shared(some_decays, decays[i] + Part::column(lane, j * kVec));
#pragma unroll
          for (int e = 0; e < kVec; ++e) {
#pragma unroll
            for (int r = 0; r < kStepRows; ++r) {
              float& s = state[r][j * kVec + e];
              s = fmaf(update[r], some_keys[e], s * some_decays[e]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
      const int row = first_row + group + r * kGroups;
      if (row < step.value_dim) {
        Part::template store<kVectors>(state[r], states + int64_t{row} * step.stride_row, lane, step.key_dim);
      }
    }
  }
}

// After all heads.
static __global__ void move_cursors_kernel(const __grid_constant__ LinearCommit p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t request = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (request < p.step.batch_size) p.move_cursor(request);
}

template <typename State, int kMaxKeys>
void launch_linear_commit(const char* what, ReportOp op, const LinearCommit& p, cudaStream_t stream) {
  constexpr int kRowsPerBlock = kCommitThreads / (kMaxKeys / kLaneElements) * kStepRows;
  const LinearStep& step = p.step;
  // Few rings are folded in most calls, so CTAs are fewer than blocks of rows.
  const int row_blocks = ceil_div(step.value_dim, kRowsPerBlock);
  const int64_t units = int64_t{step.batch_size} * step.num_heads * row_blocks;
  if (units > INT32_MAX / 2) throw std::runtime_error(std::string(what) + ": more than 2^30 blocks of rows");
  const int64_t blocks = min_of(units, int64_t{kCommitCtas} * device_sms(what));
  LaunchShape shape{
      .blocks = static_cast<int>(blocks), .threads = kCommitThreads, .shared_bytes = 0, .max_shared_bytes = 0};
  const bool vectors =
      step.key_dim * sizeof(State) % 16 == 0 &&
      rows_aligned(step.states, sizeof(State), 16, step.stride_slot, step.stride_head, step.stride_row);
  if (vectors) {
    launch_dependent<&linear_commit_kernel<State, kMaxKeys, true>>(what, shape, stream, p, op, row_blocks);
  } else {
    launch_dependent<&linear_commit_kernel<State, kMaxKeys, false>>(what, shape, stream, p, op, row_blocks);
  }
  shape.blocks = ceil_div(step.batch_size, kCommitThreads);
  launch_dependent<&move_cursors_kernel>(what, shape, stream, p);
}

}  // namespace attnops
