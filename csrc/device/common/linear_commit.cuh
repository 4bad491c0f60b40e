#pragma once
#include "core/linear_verify.h"
#include "device/common/arch.h"
#include "device/common/linear_token.cuh"

// Accepted drafts: rows of a ring move to those that count, or all of them go into the state. Few rings are folded in
// most calls, and a chain's rows lie where they belong. So CTAs that stay find the requests that have work, and share
// the heads of these.
namespace attnops {

inline constexpr int kCommitThreads = 128;
inline constexpr int kCommitRows = 16;  // of a ring, in shared memory at a time

// A request's ring: rows that count, drafts that come to them, and the drafts' places.
struct CommitRing {
  int64_t slot;
  int length, more;
  uint8_t drafts[kMaxDrafts];

  // Of row i after the commit.
  __device__ int row(int i) const { return i < length ? i : length + drafts[i - length]; }
  __device__ int rows() const { return length + more; }
};

// Some requests. The list names those that fold, from the front, and those whose rows move, from the back.
struct CommitWorks {
  CommitRing rings[kCommitThreads];
  int list[kCommitThreads];
  int2 counts[kCommitThreads / 32];  // by warp
  int folds, moves;
};

// One request a thread. All threads of the CTA come here together. The order is that of the requests, so all CTAs see
// the same.
__device__ __forceinline__ void find_works(const LinearCommit& p, int64_t request, CommitWorks& works) {
  bool folds = false, moves = false;
  if (request < p.step.batch_size) {
    CommitRing& ring = works.rings[threadIdx.x];
    const int64_t slot = p.step.state_indices[request];
    const int more = p.num_accepted(request);
#pragma unroll
    for (int i = 0; i < kMaxDrafts; ++i) {
      if (i >= p.drafts) break;
      const int draft = p.draft_row(request, 0, i);
      ring.drafts[i] = static_cast<uint8_t>(draft);
      moves |= i < more && draft != i;
    }
    if (slot >= 0 && slot < p.step.num_slots) {
      ring.slot = slot;
      ring.length = p.rings.length(slot, p.drafts);
      ring.more = more;
      folds = p.folds(ring.length, more);
      moves &= !folds;
      folds &= ring.rows() > 0;
    } else {
      moves = false;
    }
  }
  constexpr int kWarps = kCommitThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = threadIdx.x;
  const uint32_t before = (1u << lane) - 1, fold_bits = __ballot_sync(0xffffffffu, folds),
                 move_bits = __ballot_sync(0xffffffffu, moves);
  if (lane == 0) works.counts[warp] = make_int2(__popc(fold_bits), __popc(move_bits));
  __syncthreads();
  int2 first = make_int2(0, 0), all = make_int2(0, 0);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int2 some = works.counts[w];
    if (w < warp) first.x += some.x, first.y += some.y;
    all.x += some.x, all.y += some.y;
  }
  if (folds) works.list[first.x + __popc(fold_bits & before)] = own;
  if (moves) works.list[kCommitThreads - 1 - first.y - __popc(move_bits & before)] = own;
  if (own == 0) works.folds = all.x, works.moves = all.y;
  __syncthreads();
}

// Rows of drafts to those that count.
__device__ __forceinline__ void move_rows(const LinearCommit& p, const CommitRing& ring, int head) {
  const LinearStep& step = p.step;
  const int64_t slot = ring.slot;
  for (int i = ring.length; i < ring.rows(); ++i) {  // rising, so that no row is lost before it has moved
    const int from = ring.row(i);
    if (from == i) continue;
    const auto move = [&](float* to, const float* source, int count) {
      for (int c = threadIdx.x; c < count; c += kCommitThreads) to[c] = source[c];
    };
    move(p.rings.u_row(step, slot, head, i), p.rings.u_row(step, slot, head, from), step.value_dim);
    move(p.rings.decay_row(step, slot, head, i), p.rings.decay_row(step, slot, head, from),
         p.rings.per_channel ? step.key_dim : 1);
    if (head % step.heads_per_group == 0) {
      move(p.rings.k_row(step, slot, head, i), p.rings.k_row(step, slot, head, from), step.key_dim);
    }
    // A path may name a row that an earlier one has overwritten only where it does not rise, which is an error.
  }
}

// What a kernel may count on.
enum class FoldCase {
  kAny,
  kVectors,  // rows of states start on 16-byte boundaries
  kHeads,    // that, those of rings too, keys as long as the kernel's, and one decay a row
};

// Of an SM: as many as registers allow. Decode has five.
inline constexpr int fold_ctas(FoldCase fold_case) {
  return fold_case == FoldCase::kHeads ? 5 : fold_case == FoldCase::kVectors ? 3 : 1;
}

// Rows of a state that a CTA folds at a time.
template <int kMaxKeys>
inline constexpr int kFoldCtaRows = kCommitThreads / (kMaxKeys / kLaneElements) * kStepRows;

template <int kMaxKeys>
struct alignas(16) FoldRing {
  float keys[kCommitRows][kMaxKeys];  // under the decays behind them
  float decay[kMaxKeys];              // of all rows
  float updates[kCommitRows][kFoldCtaRows<kMaxKeys>];
};

// Rows [first, first + some) of a ring to shared memory, keys under the decays behind them. All of a thread's loads
// come before what is made of them, and without branches: rows behind the last one are the last one again, columns too.
template <int kMaxKeys>
__device__ __forceinline__ void bring_ring(const LinearCommit& p, const CommitRing& ring, int head, int first_row,
                                           int first, int some, FoldRing<kMaxKeys>& to) {
  constexpr int kCtaRows = kFoldCtaRows<kMaxKeys>, kUpdates = kCommitRows * kCtaRows / kCommitThreads;
  const LinearStep& step = p.step;
  float updates[kUpdates];
#pragma unroll
  for (int n = 0; n < kUpdates; ++n) {
    const int at = n * kCommitThreads + static_cast<int>(threadIdx.x), i = min_of(at / kCtaRows, some - 1);
    const int row = min_of(first_row + at % kCtaRows, step.value_dim - 1);
    updates[n] = load_here(p.rings.u_row(step, ring.slot, head, ring.row(first + i)) + row);
  }
  for (int c = threadIdx.x; c < kMaxKeys; c += kCommitThreads) {
    const int column = min_of(c, step.key_dim - 1);
    float keys[kCommitRows], decays[kCommitRows];
#pragma unroll
    for (int i = 0; i < kCommitRows; ++i) {
      const int from = ring.row(first + min_of(i, some - 1));
      keys[i] = load_here(p.rings.k_row(step, ring.slot, head, from) + column);
      decays[i] = load_here(p.rings.decay_row(step, ring.slot, head, from) + (p.rings.per_channel ? column : 0));
    }
    float behind = 1.f;
#pragma unroll
    for (int i = kCommitRows - 1; i >= 0; --i) {
      if (i >= some) continue;
      to.keys[i][c] = behind * keys[i];
      behind *= decays[i];
    }
    to.decay[c] = behind;
  }
#pragma unroll
  for (int n = 0; n < kUpdates; ++n) {
    const int at = n * kCommitThreads + static_cast<int>(threadIdx.x);
    to.updates[at / kCtaRows][at % kCtaRows] = updates[n];
  }
}

// The same with one decay a row, by accesses of 16 bytes. A lane has a row's decay, and those behind it by shuffles.
template <int kMaxKeys>
__device__ __forceinline__ void bring_vectors(const LinearCommit& p, const CommitRing& ring, int head, int first_row,
                                              int first, int some, FoldRing<kMaxKeys>& to) {
  constexpr int kCtaRows = kFoldCtaRows<kMaxKeys>, kKeyVecs = kMaxKeys / 4, kRowVecs = kCtaRows / 4;
  constexpr int kKeys = kCommitRows * kKeyVecs / kCommitThreads;
  constexpr int kUpdates = (kCommitRows * kRowVecs + kCommitThreads - 1) / kCommitThreads;
  static_assert(kCommitRows <= 32 && kCommitThreads % kKeyVecs == 0);
  const LinearStep& step = p.step;
  const int own = threadIdx.x, lane = own % 32;
  const auto row_of = [&](int i) { return ring.row(first + min_of(i, some - 1)); };
  float behind = load_here(p.rings.decay_row(step, ring.slot, head, row_of(lane)));
  float4 updates[kUpdates], keys[kKeys];
#pragma unroll
  for (int n = 0; n < kUpdates; ++n) {
    const int at = n * kCommitThreads + own, row = min_of(first_row + at % kRowVecs * 4, step.value_dim - 4);
    updates[n] = *reinterpret_cast<const float4*>(
        p.rings.u_row(step, ring.slot, head, row_of(min_of(at / kRowVecs, kCommitRows - 1))) + row);
  }
#pragma unroll
  for (int n = 0; n < kKeys; ++n) {
    const int at = n * kCommitThreads + own;
    keys[n] = *reinterpret_cast<const float4*>(p.rings.k_row(step, ring.slot, head, row_of(at / kKeyVecs)) +
                                               at % kKeyVecs * 4);
  }
  if (lane >= some) behind = 1.f;
#pragma unroll
  for (int distance = 1; distance < kCommitRows; distance *= 2) {  // of this row and those behind it
    const float more = __shfl_down_sync(0xffffffffu, behind, distance);
    if (lane + distance < 32) behind *= more;
  }
  const float all = __shfl_sync(0xffffffffu, behind, 0);
#pragma unroll
  for (int n = 0; n < kUpdates; ++n) {
    const int at = n * kCommitThreads + own;
    if (at < kCommitRows * kRowVecs)
      *reinterpret_cast<float4*>(&to.updates[at / kRowVecs][at % kRowVecs * 4]) = updates[n];
  }
#pragma unroll
  for (int n = 0; n < kKeys; ++n) {
    const int at = n * kCommitThreads + own, i = at / kKeyVecs;
    const float after = __shfl_sync(0xffffffffu, behind, min_of(i + 1, 31)), scale = i + 1 < some ? after : 1.f;
    *reinterpret_cast<float4*>(&to.keys[i][at % kKeyVecs * 4]) =
        make_float4(scale * keys[n].x, scale * keys[n].y, scale * keys[n].z, scale * keys[n].w);
  }
  for (int c = own; c < kMaxKeys; c += kCommitThreads) to.decay[c] = all;
}

// Rows [first_row, first_row + kFoldCtaRows) of a head's state after its ring: each row's update decays by what comes
// behind it, and so does the state. `turn`: which of the two places is free.
template <typename State, int kMaxKeys, FoldCase kCase>
__device__ __forceinline__ void fold_rows(const LinearCommit& p, const CommitRing& ring, int head, int first_row,
                                          FoldRing<kMaxKeys> (&both)[2], int& turn) {
  constexpr bool kVectors = kCase != FoldCase::kAny;
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kCommitThreads / kLanes;
  using Part = RowPart<State, kLanes>;
  const LinearStep& step = p.step;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int key_dim = kCase == FoldCase::kHeads ? kMaxKeys : step.key_dim;
  State* states = static_cast<State*>(step.states) + state_at(step, ring.slot, head);
  float state[kStepRows][kLaneElements];
#pragma unroll
  for (int r = 0; r < kStepRows; ++r) {
    const int row = first_row + group + r * kGroups;
    Part::template load<kVectors, true>(state[r], states + int64_t{row} * step.stride_row, lane,
                                        row < step.value_dim ? key_dim : 0);
  }
  const int count = ring.rows();
  for (int first = 0; first < count; first += kCommitRows) {
    const int some = min_of(count - first, kCommitRows);
    FoldRing<kMaxKeys>& shared = both[turn];  // the others may still read that of the turn before
    turn ^= 1;
    if constexpr (kCase == FoldCase::kHeads) {
      bring_vectors<kMaxKeys>(p, ring, head, first_row, first, some, shared);
    } else {
      bring_ring<kMaxKeys>(p, ring, head, first_row, first, some, shared);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < Part::kVecs; ++j) {
      float decays[Part::kVec];
      load_shared(decays, shared.decay + Part::column(lane, j * Part::kVec));
#pragma unroll
      for (int e = 0; e < Part::kVec; ++e) {
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) state[r][j * Part::kVec + e] *= decays[e];
      }
    }
#pragma unroll 2
    for (int i = 0; i < some; ++i) {
      float update[kStepRows];
#pragma unroll
      for (int r = 0; r < kStepRows; ++r) update[r] = shared.updates[i][group + r * kGroups];
#pragma unroll
      for (int j = 0; j < Part::kVecs; ++j) {
        constexpr int kVec = Part::kVec;
        float keys[kVec];
        load_shared(keys, shared.keys[i] + Part::column(lane, j * kVec));
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int r = 0; r < kStepRows; ++r) {
            state[r][j * kVec + e] = fmaf(update[r], keys[e], state[r][j * kVec + e]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kStepRows; ++r) {
    const int row = first_row + group + r * kGroups;
    if (row < step.value_dim) {
      Part::template store<kVectors, true>(state[r], states + int64_t{row} * step.stride_row, lane, key_dim);
    }
  }
}

// Grid: any number of CTAs.
template <typename State, int kMaxKeys, FoldCase kCase>
__global__ void __launch_bounds__(kCommitThreads, fold_ctas(kCase))
    linear_commit_kernel(const __grid_constant__ LinearCommit p, ReportOp op) {
  __shared__ CommitWorks works;
  __shared__ FoldRing<kMaxKeys> rows[2];
  int turn = 0;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int parts = ceil_div(step.value_dim, kFoldCtaRows<kMaxKeys>), heads = step.num_heads;
  int own = blockIdx.x;  // of the works that are still to come
  for (int first = 0; first < step.batch_size; first += kCommitThreads) {
    const int64_t request = int64_t{first} + threadIdx.x;
    if (step.report != nullptr && blockIdx.x == 0 && request < step.batch_size) p.check(op, request, step.report);
    __syncthreads();
    find_works(p, request, works);
    const int folds = works.folds * heads * parts, all = folds + works.moves * heads;
    const auto ring_of = [&](int fold) -> const CommitRing& { return works.rings[works.list[fold / (heads * parts)]]; };
    for (; own < all; own += gridDim.x) {
      if (own < folds) {
        fold_rows<State, kMaxKeys, kCase>(p, ring_of(own), own / parts % heads, own % parts * kFoldCtaRows<kMaxKeys>,
                                          rows, turn);
      } else {
        const int move = own - folds;
        move_rows(p, works.rings[works.list[kCommitThreads - 1 - move / heads]], move % heads);
      }
    }
    own -= all;
  }
}

// After all heads. The kernel that folds has waited for those ahead of it before this one starts, and writes nothing
// that is read here.
static __global__ void move_cursors_kernel(const __grid_constant__ LinearCommit p) {
  const int64_t request = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  LinearCommit::Cursor cursor{};
  if (request < p.step.batch_size) cursor = p.cursor(request);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (cursor.length != nullptr) *cursor.length = cursor.moved;
}

template <typename State, int kMaxKeys>
void launch_linear_commit(const char* what, ReportOp op, const LinearCommit& p, cudaStream_t stream) {
  const LinearStep& step = p.step;
  const int64_t most = int64_t{step.batch_size} * step.num_heads * ceil_div(step.value_dim, kFoldCtaRows<kMaxKeys>);
  LaunchShape shape{.blocks = 0, .threads = kCommitThreads, .shared_bytes = 0, .max_shared_bytes = 0};
  const auto run = [&](auto which) {
    constexpr FoldCase kCase = decltype(which)::value;
    const int64_t resident = int64_t{max_of(fold_ctas(kCase), 2)} * device_sms(what);
    shape.blocks = static_cast<int>(most < resident ? most : resident);
    launch_dependent<&linear_commit_kernel<State, kMaxKeys, kCase>>(what, shape, stream, p, op);
  };
  using Case = FoldCase;
  const bool vectors =
      step.key_dim * sizeof(State) % 16 == 0 &&
      rows_aligned(step.states, sizeof(State), 16, step.stride_slot, step.stride_head, step.stride_row);
  if (!vectors) {
    run(std::integral_constant<Case, Case::kAny>{});
  } else if (p.rings.per_channel || step.key_dim != kMaxKeys || step.value_dim % 4 != 0 ||
             !rows_aligned(p.rings.u, 4, 16) || !rows_aligned(p.rings.k, 4, 16)) {
    run(std::integral_constant<Case, Case::kVectors>{});
  } else {
    run(std::integral_constant<Case, Case::kHeads>{});
  }
  shape.blocks = ceil_div(step.batch_size, kCommitThreads);
  launch_dependent<&move_cursors_kernel>(what, shape, stream, p);
}

}  // namespace attnops
