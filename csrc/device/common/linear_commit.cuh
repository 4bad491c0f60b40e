#pragma once
#include "core/linear_verify.h"
#include "device/common/arch.h"
#include "device/common/linear_token.cuh"

// Accepted drafts: rows of a ring move to those that count, or all of them go into the state, one after another as
// decoding takes them.
namespace attnops {

inline constexpr int kCommitThreads = kStepThreads;
inline constexpr int kCommitRows = 16;  // of a ring, in shared memory at a time

// Rows of a ring, and how far it reaches after the commit.
struct CommitRows {
  int length, more;

  __device__ CommitRows(const LinearCommit& p, int64_t request, int64_t slot)
      : length(p.rings.length(slot, p.drafts)), more(p.num_accepted(request)) {}
  __device__ int at(const LinearCommit& p, int64_t request, int i) const {
    return i < length ? i : p.draft_row(request, length, i - length);
  }
};

// Grid: parts of the row blocks x heads x requests, in one dimension. The first part of a head moves its rows.
template <typename State, int kMaxKeys, bool kVectors>
__global__ void __launch_bounds__(kCommitThreads)
    linear_commit_kernel(const __grid_constant__ LinearCommit p, ReportOp op, int parts) {
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kCommitThreads / kLanes;
  using Part = RowPart<State, kLanes>;
  constexpr int kCtaRows = kGroups * kStepRows;
  alignas(16) __shared__ float keys[kCommitRows][kMaxKeys], decays[kCommitRows][kMaxKeys];
  __shared__ float updates[kCommitRows][kCtaRows];
  __shared__ int from[kCommitRows];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int part = blockIdx.x % parts, work = blockIdx.x / parts;
  const int head = work % step.num_heads, request = work / step.num_heads;
  if (step.report != nullptr && part == 0 && head == 0 && threadIdx.x == 0) p.check(op, request, step.report);
  const int64_t slot = step.state_indices[request];
  if (slot < 0 || slot >= step.num_slots) return;
  const CommitRows rows(p, request, slot);
  const bool channels = p.rings.per_channel;
  if (!p.folds(rows.length, rows.more)) {
    if (part != 0) return;
    for (int i = rows.length; i < rows.length + rows.more; ++i) {  // rising, so that no row is lost before it has moved
      const int from = rows.at(p, request, i);
      if (from == i) continue;
      const auto move = [&](float* to, const float* source, int count) {
        for (int c = threadIdx.x; c < count; c += kCommitThreads) to[c] = source[c];
      };
      move(p.rings.u_row(step, slot, head, i), p.rings.u_row(step, slot, head, from), step.value_dim);
      move(p.rings.decay_row(step, slot, head, i), p.rings.decay_row(step, slot, head, from),
           channels ? step.key_dim : 1);
      if (head % step.heads_per_group == 0) {
        move(p.rings.k_row(step, slot, head, i), p.rings.k_row(step, slot, head, from), step.key_dim);
      }
      // A path may name a row that an earlier one has overwritten only where it does not rise, which is an error.
    }
    return;
  }
  const int count = rows.length + rows.more;
  if (count == 0) return;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  State* states = static_cast<State*>(step.states) + state_at(step, slot, head);
  const auto load_rows = [&](float(&to)[kStepRows][kLaneElements], int first_row) {
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
      const int row = first_row + group + r * kGroups;
      Part::template load<kVectors>(to[r], states + int64_t{row} * step.stride_row, lane,
                                    row < step.value_dim ? step.key_dim : 0);
    }
  };
  float state[kStepRows][kLaneElements], next[kStepRows][kLaneElements];
  load_rows(state, part * kCtaRows);
  for (int first_row = part * kCtaRows; first_row < step.value_dim; first_row += parts * kCtaRows) {
    const bool more = first_row + parts * kCtaRows < step.value_dim;
    if (more) load_rows(next, first_row + parts * kCtaRows);
    for (int first = 0; first < count; first += kCommitRows) {
      const int some = min_of(count - first, kCommitRows);
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < some) from[threadIdx.x] = rows.at(p, request, first + threadIdx.x);
      __syncthreads();
#pragma unroll 4
      for (int i = threadIdx.x; i < some * kCtaRows; i += kCommitThreads) {
        const int row = first_row + i % kCtaRows;
        updates[i / kCtaRows][i % kCtaRows] =
            row < step.value_dim ? p.rings.u_row(step, slot, head, from[i / kCtaRows])[row] : 0.f;
      }
      if (first_row == part * kCtaRows || count > kCommitRows) {  // else they are there
#pragma unroll 4
        for (int i = threadIdx.x; i < some * kMaxKeys; i += kCommitThreads) {
          const int c = i % kMaxKeys, own = from[i / kMaxKeys];
          const bool inside = c < step.key_dim;
          keys[i / kMaxKeys][c] = inside ? p.rings.k_row(step, slot, head, own)[c] : 0.f;
          decays[i / kMaxKeys][c] = inside ? p.rings.decay_row(step, slot, head, own)[channels ? c : 0] : 0.f;
        }
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
    if (!more) return;
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) state[r][i] = next[r][i];
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
  // Few rings are folded in most calls: where heads fill the GPU, a CTA has all rows of one, and most have none.
  const int64_t heads = int64_t{step.batch_size} * step.num_heads;
  const int parts = heads >= 2 * device_sms(what) ? 1 : ceil_div(step.value_dim, kRowsPerBlock);
  const int64_t blocks = heads * parts;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  LaunchShape shape{
      .blocks = static_cast<int>(blocks), .threads = kCommitThreads, .shared_bytes = 0, .max_shared_bytes = 0};
  const bool vectors =
      step.key_dim * sizeof(State) % 16 == 0 &&
      rows_aligned(step.states, sizeof(State), 16, step.stride_slot, step.stride_head, step.stride_row);
  if (vectors) {
    launch_dependent<&linear_commit_kernel<State, kMaxKeys, true>>(what, shape, stream, p, op, parts);
  } else {
    launch_dependent<&linear_commit_kernel<State, kMaxKeys, false>>(what, shape, stream, p, op, parts);
  }
  shape.blocks = ceil_div(step.batch_size, kCommitThreads);
  launch_dependent<&move_cursors_kernel>(what, shape, stream, p);
}

}  // namespace attnops
