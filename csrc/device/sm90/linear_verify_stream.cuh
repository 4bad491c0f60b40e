#pragma once
#include "core/impl_table.h"
#include "core/math.h"
#include "device/common/capability.h"
#include "device/common/linear_verify.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"

// Drafts of many requests against float32 states: CTAs that stay, one an SM. A head's state, and its ring's rows, come
// by bulk copies while others are multiplied. Three groups of warps work on heads one behind another: what drafts
// bring, products with states, rows of values through the drafts. All sums are those of linear_verify_kernel, bit for
// bit.
namespace attnops::sm90 {

inline constexpr int kStreamStates = 2, kStreamMostSmalls = 3;
inline constexpr int kStreamMostDrafts = 8, kStreamMostRows = 32;  // of a ring, before the drafts
// Warps by what they do; one more loads.
inline constexpr int kProductWarps = 8, kDraftWarps = 3, kRowWarps = 4;
inline constexpr int kStreamThreads = 32 * (kProductWarps + kDraftWarps + kRowWarps + 1);

// Of a head, while it is on its way.
struct StreamNote {
  int64_t slot;
  int length;  // of its ring; below 0: the request is padding
  uint32_t ancestors[kStreamMostDrafts];
};

struct StreamControl {
  uint64_t state_full[kStreamStates], state_empty[kStreamStates], dots_full[2], dots_empty[2];
  // Of a head's rows: the ring's are there; the drafts' are; their products are; all have been read.
  uint64_t ring_full[kStreamMostSmalls], drafts_full[kStreamMostSmalls], products_full[kStreamMostSmalls],
      small_empty[kStreamMostSmalls];
  StreamNote notes[kStreamMostSmalls];
};

// kKeys columns, kRows rows of a state.
template <int kKeys, int kRows>
struct StreamLayout {
  static constexpr int kStateBytes = kKeys * kRows * 4;
  VerifyLayout at;
  int smalls;  // heads whose rows have a place

  __host__ __device__ StreamLayout(const LinearVerify& p, int places)
      : at{.drafts = p.drafts,
           .keys = kKeys,
           .cta_rows = kRows,
           .rows_before = p.rings.rows - p.drafts,
           .channels = false},
        smalls(places) {}
  __host__ __device__ int small_floats() const { return round_up(at.dots(), 32); }
  __host__ __device__ int dots_floats() const { return round_up(kRows * (2 * at.drafts + 1), 32); }
  __host__ __device__ int bytes() const {
    return kStreamStates * kStateBytes + 4 * (smalls * small_floats() + 2 * dots_floats()) +
           static_cast<int>(sizeof(StreamControl));
  }
};

// A place of several, and how often all have been used.
struct StreamTurn {
  int places, place = 0;
  uint32_t phase = 0;
  __device__ explicit StreamTurn(int of) : places(of) {}
  __device__ void next() {
    if (++place == places) place = 0, phase ^= 1;
  }
};

template <int kKeys, int kRows, bool kDelta>
class VerifyStream {
 public:
  using Layout = StreamLayout<kKeys, kRows>;

  __device__ VerifyStream(const LinearVerify& p, unsigned char* memory, int smalls, int works)
      : p_(p), layout_(p, smalls), works_(works), memory_(memory) {
    smalls_ = reinterpret_cast<float*>(memory + kStreamStates * Layout::kStateBytes);
    dots_ = smalls_ + smalls * layout_.small_floats();
    control_ = reinterpret_cast<StreamControl*>(dots_ + 2 * layout_.dots_floats());
  }

  __device__ void run() {
    const int warp = threadIdx.x / 32;
    StreamControl& c = *control_;
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStreamStates; ++i) init(c.state_full[i], 1), init(c.state_empty[i], kProductWarps);
      for (int i = 0; i < 2; ++i) init(c.dots_full[i], kProductWarps), init(c.dots_empty[i], kRowWarps);
      for (int i = 0; i < layout_.smalls; ++i) {
        init(c.ring_full[i], 1), init(c.drafts_full[i], kDraftWarps);
        init(c.products_full[i], kDraftWarps), init(c.small_empty[i], kRowWarps);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (warp < kProductWarps) {
      multiply_states();
    } else if (warp < kProductWarps + kDraftWarps) {
      make_drafts(threadIdx.x - 32 * kProductWarps);
    } else if (warp < kProductWarps + kDraftWarps + kRowWarps) {
      finish_rows(threadIdx.x - 32 * (kProductWarps + kDraftWarps));
    } else {
      load();
    }
  }

 private:
  __device__ static void init(uint64_t& barrier, int arrivals) { mbarrier_init(smem_address(&barrier), arrivals); }
  __device__ static void wait(uint64_t& barrier, uint32_t parity) { mbarrier_wait(smem_address(&barrier), parity); }
  // For all lanes of the warp.
  __device__ static void arrive(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&barrier));
  }
  __device__ float* small(const StreamTurn& turn) const { return smalls_ + turn.place * layout_.small_floats(); }

  // The slot of a work, and its ring's rows; below 0: padding. What lies behind the last work counts as that.
  __device__ int64_t slot_of(int work) const {
    if (work >= works_) return -1;
    const int64_t slot = p_.step.state_indices[work / p_.step.num_heads];
    return slot < p_.step.num_slots ? slot : -1;
  }
  __device__ int length_of(int64_t slot) const { return slot < 0 ? -1 : p_.rings.length(slot, p_.drafts); }
  // A lane's row; one that does not count yet may hold anything.
  __device__ float decay_of(int work, int64_t slot) const {
    const int lane = threadIdx.x % 32;
    return slot >= 0 && lane < layout_.at.rows_before
               ? *p_.rings.decay_row(p_.step, slot, work % p_.step.num_heads, lane)
               : 1.f;
  }

  // One warp. Slots are read two works ahead, and what they lead to one ahead, so that no read waits for another.
  __device__ void load() {
    const LinearStep& step = p_.step;
    const VerifyLayout& at = layout_.at;
    const int lane = threadIdx.x % 32, stride = gridDim.x;
    StreamTurn turn(layout_.smalls), states(kStreamStates);
    int64_t slot = slot_of(blockIdx.x), next_slot = slot_of(blockIdx.x + stride);
    int length = length_of(slot);
    float decay = decay_of(blockIdx.x, slot);
    for (int work = blockIdx.x; work < works_; work += stride) {
      const int64_t slot_behind = slot_of(work + 2 * stride);
      const int next_length = length_of(next_slot);
      const float next_decay = decay_of(work + stride, next_slot);
      const int head = work % step.num_heads;
      if (step.report != nullptr && head == 0 && lane == 0) {
        p_.check(kDelta ? kReportDeltaVerify : kReportSsdVerify, work / step.num_heads, step.report);
      }
      wait(control_->small_empty[turn.place], turn.phase ^ 1);
      float* to = small(turn);
      if (lane < length) to[at.decays() + 4 * lane] = decay;
      __syncwarp();
      if (lane == 0) {
        StreamNote& note = control_->notes[turn.place];
        note.slot = slot;
        note.length = length;
        const uint32_t full = smem_address(&control_->ring_full[turn.place]);
        const int keys = max_of(length, 0) * kKeys * 4, values = max_of(length, 0) * kRows * 4;
        mbarrier_arrive_expect(full, keys + values);
        if (length > 0) {
          copy_bytes(smem_address(to + at.row_keys()), p_.rings.k_row(step, slot, head, 0), keys, full);
          copy_bytes(smem_address(to + at.values()), p_.rings.u_row(step, slot, head, 0), values, full);
        }
        wait(control_->state_empty[states.place], states.phase ^ 1);
        const uint32_t state_full = smem_address(&control_->state_full[states.place]);
        mbarrier_arrive_expect(state_full, slot < 0 ? 0 : Layout::kStateBytes);
        if (slot >= 0) {
          constexpr int kParts = 4, kPart = Layout::kStateBytes / kParts;
          const auto* from = reinterpret_cast<const unsigned char*>(static_cast<const float*>(step.states) +
                                                                    state_at(step, slot, head));
          const uint32_t state = smem_address(memory_ + states.place * Layout::kStateBytes);
          for (int i = 0; i < kParts; ++i) copy_bytes(state + i * kPart, from + i * kPart, kPart, state_full);
        }
      }
      __syncwarp();
      slot = next_slot, next_slot = slot_behind, length = next_length, decay = next_decay;
      turn.next(), states.next();
    }
  }

  // What a warp of them reads of its drafts.
  static constexpr int kOwnDrafts = ceil_div(kStreamMostDrafts, kDraftWarps);
  using Inputs = DraftInputs<kKeys, kDelta, false>;

  __device__ void read_drafts(Inputs (&own)[kOwnDrafts], int work, int warp) const {
    const int head = work % p_.step.num_heads, request = work / p_.step.num_heads;
#pragma unroll
    for (int i = 0; i < kOwnDrafts; ++i) {
      const int t = warp + i * kDraftWarps;
      if (t < p_.drafts) own[i].load(p_.step, int64_t{request} * p_.drafts + t, head);
    }
  }

  // Keys, queries and gates of a head's drafts, and products of their rows. Those of the next head are read meanwhile.
  __device__ void make_drafts(int thread) {
    const VerifyLayout& at = layout_.at;
    const int warp = thread / 32, drafts = at.drafts;
    StreamTurn turn(layout_.smalls);
    Inputs own[kOwnDrafts];
    read_drafts(own, blockIdx.x, warp);
    for (int work = blockIdx.x; work < works_; work += gridDim.x) {
      const int head = work % p_.step.num_heads, request = work / p_.step.num_heads;
      float* to = small(turn);
      StreamNote& note = control_->notes[turn.place];
      wait(control_->small_empty[turn.place], turn.phase ^ 1);
      const uint32_t ancestors = thread < drafts ? p_.ancestors(request, thread) : 0;
#pragma unroll
      for (int i = 0; i < kOwnDrafts; ++i) {
        const int t = warp + i * kDraftWarps, row = at.rows_before + t;
        if (t >= drafts) break;
        make_draft(p_.step, own[i], to + at.row_keys() + row * kKeys, to + at.queries() + t * kKeys,
                   to + at.decays() + row * 4, to + at.coefficients() + t);
      }
      arrive(control_->drafts_full[turn.place]);
      if (thread < drafts) note.ancestors[thread] = ancestors;
      const int next = work + gridDim.x;
      if (next < works_) read_drafts(own, next, warp);
      wait(control_->ring_full[turn.place], turn.phase);
      const int length = note.length;
      named_barrier_sync(1, 32 * kDraftWarps);
      if (length >= 0) {
        multiply_rows<kKeys, 32 * kDraftWarps>(at, to, thread, length, [&](int t) { return note.ancestors[t]; });
        store_drafts<kKeys, false, kDraftWarps>(p_, at, to, warp, note.slot, head, length);
      }
      arrive(control_->products_full[turn.place]);
      turn.next();
    }
  }

  // A thread has every 32nd row of a state, and 16 of its columns.
  __device__ void multiply_states() {
    constexpr int kLanes = kKeys / kLaneElements, kGroups = 32 * kProductWarps / kLanes, kEach = kRows / kGroups;
    using Part = RowPart<float, kLanes>;
    constexpr int kAtOnce = kLanes, kVec = Part::kVec;
    const VerifyLayout& at = layout_.at;
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, drafts = at.drafts;
    const int stride = 2 * drafts + 1, count = kDelta ? 2 * drafts : drafts;
    StreamTurn turn(layout_.smalls), states(kStreamStates), dots(2);
    for (int work = blockIdx.x; work < works_; work += gridDim.x) {
      const float* rows = small(turn);
      const float* state = reinterpret_cast<const float*>(memory_ + states.place * Layout::kStateBytes);
      float* to = dots_ + dots.place * layout_.dots_floats();
      wait(control_->dots_empty[dots.place], dots.phase ^ 1);
      wait(control_->drafts_full[turn.place], turn.phase);
      wait(control_->state_full[states.place], states.phase);
      for (int first = 0; first < count; first += kAtOnce) {
        const float* vectors[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const int i = min_of(first + n, count - 1), t = kDelta ? i / 2 : i;
          vectors[n] =
              rows + (!kDelta || i % 2 != 0 ? at.queries() + t * kKeys : at.row_keys() + (at.rows_before + t) * kKeys);
        }
        float sums[kEach][kAtOnce] = {};
#pragma unroll
        for (int j = 0; j < Part::kVecs; ++j) {
          const int column = Part::column(lane, j * kVec);
          float own[kEach][kVec];
#pragma unroll
          for (int r = 0; r < kEach; ++r) load_shared(own[r], state + (group + r * kGroups) * kKeys + column);
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            float values[kVec];
            load_shared(values, vectors[n] + column);
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
#pragma unroll
              for (int r = 0; r < kEach; ++r) sums[r][n] = fmaf(own[r][e], values[e], sums[r][n]);
            }
          }
        }
        if (first + kAtOnce >= count) arrive(control_->state_empty[states.place]);
#pragma unroll
        for (int r = 0; r < kEach; ++r) {
          const float sum = sum_of_each<kLanes>(sums[r]);
          const int i = first + lane;
          if (i < count) to[(group + r * kGroups) * stride + (kDelta ? i : 2 * i + 1)] = sum;
        }
      }
      arrive(control_->dots_full[dots.place]);
      turn.next(), states.next(), dots.next();
    }
  }

  // A row of values a thread.
  __device__ void finish_rows(int row) {
    const LinearStep& step = p_.step;
    const VerifyLayout& at = layout_.at;
    const int drafts = at.drafts;
    StreamTurn turn(layout_.smalls), dots(2);
    for (int work = blockIdx.x; work < works_; work += gridDim.x) {
      const int head = work % step.num_heads, request = work / step.num_heads;
      const int64_t first_token = int64_t{request} * drafts;
      float* rows = small(turn);
      if (row < kRows) {
        with_token_type(step.dtype, [&](auto type) {
          using T = decltype(type);
          const T* from = static_cast<const T*>(step.v.data) + first_token * step.v.stride_request +
                          head * step.v.stride_head + row;
          float own[kStreamMostDrafts];
#pragma unroll
          for (int t = 0; t < kStreamMostDrafts; ++t) {
            own[t] = t < drafts ? static_cast<float>(from[t * step.v.stride_request]) : 0.f;
          }
#pragma unroll
          for (int t = 0; t < kStreamMostDrafts; ++t) {
            if (t < drafts) rows[at.values() + (at.rows_before + t) * kRows + row] = own[t];
          }
        });
      }
      wait(control_->ring_full[turn.place], turn.phase);
      wait(control_->products_full[turn.place], turn.phase);
      wait(control_->dots_full[dots.place], dots.phase);
      const int64_t slot = control_->notes[turn.place].slot;
      const int length = control_->notes[turn.place].length;
      if (length < 0) {
        clear_tokens(step, head, first_token, first_token + drafts, 0, kRows, row, 32 * kRowWarps);
      } else if (row < kRows) {
        finish_row<kDelta, false>(p_, at, rows, dots_ + dots.place * layout_.dots_floats() + row * (2 * drafts + 1),
                                  slot, request, head, length, row, row);
      }
      arrive(control_->dots_empty[dots.place]);
      arrive(control_->small_empty[turn.place]);
      turn.next(), dots.next();
    }
  }

  const LinearVerify& p_;
  const Layout layout_;
  const int works_;
  unsigned char* memory_;
  float *smalls_, *dots_;
  StreamControl* control_;
};

template <int kKeys, int kRows, bool kDelta>
__global__ void __launch_bounds__(kStreamThreads, 1)
    verify_stream_kernel(const __grid_constant__ LinearVerify p, int smalls, int works) {
  extern __shared__ __align__(128) unsigned char memory[];
  VerifyStream<kKeys, kRows, kDelta>(p, memory, smalls, works).run();
}

// Places of rows that fit beside two states; below 2: the kernel does not take the call.
template <int kKeys, int kRows>
int stream_smalls(const LinearVerify& p, int most_bytes) {
  const LinearStep& step = p.step;
  const bool fits = step.state_dtype == DType::kFloat32 && !step.gate_per_channel && step.key_dim == kKeys &&
                    step.value_dim == kRows && step.stride_row == kKeys && p.drafts <= kStreamMostDrafts &&
                    p.rings.rows - p.drafts <= kStreamMostRows &&
                    rows_aligned(step.states, 4, 16, step.stride_slot, step.stride_head, step.stride_row) &&
                    rows_aligned(p.rings.u, 4, 16, 0, 0, 0) && rows_aligned(p.rings.k, 4, 16, 0, 0, 0);
  if (!fits) return 0;
  for (int smalls = kStreamMostSmalls; smalls >= 2; --smalls) {
    if (StreamLayout<kKeys, kRows>(p, smalls).bytes() <= most_bytes) return smalls;
  }
  return 0;
}

// Whether the call was one for this kernel, which then runs: states fill the GPU several times.
template <int kKeys, int kRows, bool kDelta>
bool launch_verify_stream(const char* what, const LinearVerify& p, cudaStream_t stream) {
  constexpr int kMostBytes = 227 << 10;
  const int64_t works = int64_t{p.step.batch_size} * p.step.num_heads;
  if (works > INT32_MAX / 4) return false;
  const int smalls = stream_smalls<kKeys, kRows>(p, kMostBytes), sms = device_sms(what);
  if (smalls < 2 || works < 4 * sms || usable_sm(what) != 90) return false;
  static ImplCounts chosen(what, {kRows == 64 ? "sm90_stream_64" : "sm90_stream_128"});
  chosen.counts[0].fetch_add(1, std::memory_order_relaxed);
  launch_dependent<&verify_stream_kernel<kKeys, kRows, kDelta>>(
      what,
      {.blocks = sms,
       .threads = kStreamThreads,
       .shared_bytes = StreamLayout<kKeys, kRows>(p, smalls).bytes(),
       .max_shared_bytes = kMostBytes},
      stream, p, smalls, static_cast<int>(works));
  return true;
}

}  // namespace attnops::sm90
