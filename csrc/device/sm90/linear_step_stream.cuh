#pragma once
#include "device/common/arch.h"
#include "device/common/capability.h"
#include "device/common/linear_step.cuh"
#include "device/common/linear_step_impl.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"

// The step of device/common/linear_step.cuh for large batches. A CTA stays, and takes an even share of all rows, in
// units of 8 KB that lie densely. One warp asks the copy engine for units, and to write them back, some units ahead;
// four others compute in place. Each row's arithmetic is that of the other kernel, so bits do not depend on which runs.
namespace attnops::sm90 {

inline constexpr int kUnitStages = 12, kUnitLag = 3;  // kUnitLag: stores in flight at most
inline constexpr int kStreamThreads = kStepThreads + 32;

template <int kMaxKeys>
struct StreamShared {
  alignas(128) unsigned char units[kUnitStages][kUnitBytes];
  StepColumns<kMaxKeys> columns[2];  // of the head at work, and of the one before
  float values[2][kMaxStateDim], z[2][kMaxStateDim];
  alignas(8) uint64_t full[kUnitStages], done[kUnitStages];
};

// Units [first, last) of a call, in the order of the states' rows, and where they lie.
struct StreamUnits {
  int64_t first, last;
  int per_head, rows;

  __device__ StreamUnits(int value_dim, int heads, int unit_rows) : per_head(value_dim / unit_rows), rows(unit_rows) {
    const int64_t all = int64_t{per_head} * heads;
    first = all * blockIdx.x / gridDim.x, last = all * (blockIdx.x + 1) / gridDim.x;
  }
  __device__ int head(int64_t unit) const { return static_cast<int>(unit / per_head); }  // of all requests' heads
  __device__ int row(int64_t unit) const { return static_cast<int>(unit % per_head) * rows; }
};

// One lane: loads and stores.
template <typename State, int kMaxKeys>
__device__ __forceinline__ void move_units(const LinearStep& p, ReportOp op, StreamShared<kMaxKeys>& s,
                                           const StreamUnits& units) {
  struct Place {
    const State* from;
    State* to;
  };
  int request = -1;
  const State* source = nullptr;
  State* target = nullptr;
  const auto place = [&](int64_t unit) {  // a pool slot is looked up once a request
    const int head = units.head(unit);
    if (head / p.num_heads != request) {
      request = head / p.num_heads;
      const StepSlots<State> slots(p, op, request, 0, false);
      source = slots.from, target = slots.to;
    }
    const int64_t at = int64_t{head % p.num_heads} * p.stride_head + int64_t{units.row(unit)} * kMaxKeys;
    return Place{source == nullptr ? nullptr : source + at, target == nullptr ? nullptr : target + at};
  };
  const auto load = [&](int64_t unit) {
    const int stage = static_cast<int>((unit - units.first) % kUnitStages);
    const uint32_t full = smem_address(&s.full[stage]);
    const State* from = place(unit).from;
    if (from == nullptr) return mbarrier_arrive(full);
    mbarrier_arrive_expect(full, kUnitBytes);
    copy_bytes(smem_address(s.units[stage]), from, kUnitBytes, full);
  };
  for (int64_t unit = units.first; unit < units.last && unit < units.first + kUnitStages; ++unit) load(unit);
  for (int64_t unit = units.first; unit < units.last; ++unit) {
    const int64_t i = unit - units.first;
    const int stage = static_cast<int>(i % kUnitStages);
    mbarrier_wait(smem_address(&s.done[stage]), static_cast<uint32_t>(i / kUnitStages & 1));
    if (State* to = place(unit).to; to != nullptr) store_bytes(to, smem_address(s.units[stage]), kUnitBytes);
    commit_stores();
    if (i < kUnitLag) continue;
    wait_for_reads_of_stores<kUnitLag>();  // the unit's before the last ones: its stage is free
    if (unit - kUnitLag + kUnitStages < units.last) load(unit - kUnitLag + kUnitStages);
  }
  wait_for_reads_of_stores<0>();
}

template <typename State, int kMaxKeys, bool kDelta, bool kChannels>
__global__ void __launch_bounds__(kStreamThreads, 2) linear_step_stream_kernel(const __grid_constant__ LinearStep p) {
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kStepThreads / kLanes;
  constexpr int kUnitRows = kUnitBytes / (kMaxKeys * static_cast<int>(sizeof(State)));
  constexpr int kRows = kUnitRows / kGroups;
  constexpr ReportOp kOp = kDelta ? kReportDeltaDecode : kReportSsdDecode;
  using Part = RowPart<State, kLanes>;
  using Token = StepToken<kMaxKeys, kDelta, kChannels>;
  extern __shared__ __align__(128) unsigned char memory[];
  StreamShared<kMaxKeys>& s = *reinterpret_cast<StreamShared<kMaxKeys>*>(memory);
  if (threadIdx.x < kUnitStages) {
    mbarrier_init(smem_address(&s.full[threadIdx.x]), 1);
    mbarrier_init(smem_address(&s.done[threadIdx.x]), kStepThreads);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const StreamUnits units(p.value_dim, p.batch_size * p.num_heads, kUnitRows);
  if (threadIdx.x >= kStepThreads) {
    if (threadIdx.x == kStepThreads) move_units<State, kMaxKeys>(p, kOp, s, units);
    return;
  }
  if (units.first == units.last) return;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;

  // A head's token is asked for while the one before is at work.
  constexpr int kEachValue = kMaxStateDim / kStepThreads;
  Token token;
  float values[kEachValue], z[kEachValue];
  bool padding = false;
  const auto ask = [&](int of_all) {
    const int head = of_all % p.num_heads, request = of_all / p.num_heads;
    const bool reports = head == 0 && threadIdx.x == 0 && int64_t{of_all} * units.per_head >= units.first;
    padding = StepSlots<State>(p, kOp, request, head, reports).from == nullptr;
    with_token_type(p.dtype, [&](auto type) {
      using T = decltype(type);
      token.template load<T>(p, request, head);
#pragma unroll
      for (int i = 0; i < kEachValue; ++i) {
        const int row = i * kStepThreads + threadIdx.x;
        values[i] = row < p.value_dim ? Token::template at<T>(p.v, request, head, row) : 0.f;
        const bool gated = !kDelta && p.z.data != nullptr && row < p.value_dim;
        z[i] = gated ? Token::template at<T>(p.z, request, head, row) : 0.f;
      }
    });
  };
  const int last_head = units.head(units.last - 1);
  int at_work = -1, buffer = 0;
  bool is_padding = false;
  StepHead made;
  ask(units.head(units.first));
  for (int64_t unit = units.first; unit < units.last; ++unit) {
    const int of_all = units.head(unit);
    if (of_all != at_work) {
      at_work = of_all, buffer ^= 1, is_padding = padding;
      token.make(p, of_all % p.num_heads, s.columns[buffer]);
      made.gates(p, of_all % p.num_heads, token);
#pragma unroll
      for (int i = 0; i < kEachValue; ++i) {
        s.values[buffer][i * kStepThreads + threadIdx.x] = values[i];
        if constexpr (!kDelta) s.z[buffer][i * kStepThreads + threadIdx.x] = z[i];
      }
      named_barrier_sync(1, kStepThreads);
      made.scales(p, s.columns[buffer]);
      if (of_all < last_head) ask(of_all + 1);
    }
    const int64_t i = unit - units.first;
    const int stage = static_cast<int>(i % kUnitStages), first_row = units.row(unit);
    State* rows = reinterpret_cast<State*>(s.units[stage]);
    mbarrier_wait(smem_address(&s.full[stage]), static_cast<uint32_t>(i / kUnitStages & 1));
    float state[kRows][kLaneElements], value[kRows], out[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Part::template load<true>(state[r], rows + (group + r * kGroups) * kMaxKeys, lane, kMaxKeys);
      value[r] = s.values[buffer][first_row + group + r * kGroups];
    }
    step_rows<Part, kLanes, kDelta, kChannels>(state, s.columns[buffer], made, lane, value, out);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Part::template store<true>(state[r], rows + (group + r * kGroups) * kMaxKeys, lane, kMaxKeys);
    }
    fence_async_proxy();
    mbarrier_arrive(smem_address(&s.done[stage]));
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = first_row + group + r * kGroups;
        const float gate = kDelta ? 0.f : s.z[buffer][row];
        store_step_out<kDelta>(p, of_all / p.num_heads, of_all % p.num_heads, row, out[r], value[r], gate, is_padding);
      }
    }
    __syncwarp();
  }
}

template <bool kDelta, bool kChannels, typename State, int kMaxKeys>
void launch_linear_stream(const char* what, const LinearStep& p, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(StreamShared<kMaxKeys>));
  const LaunchShape shape{
      .blocks = 2 * device_sms(what), .threads = kStreamThreads, .shared_bytes = kBytes, .max_shared_bytes = kBytes};
  launch_dependent<&linear_step_stream_kernel<State, kMaxKeys, kDelta, kChannels>>(what, shape, stream, p);
}

}  // namespace attnops::sm90
