#pragma once
#include "core/linear_prefill.h"
#include "device/common/linear_token.cuh"

// Prompts token by token, in float32: the kernel for what no chunked kernel takes. A group of lanes owns rows of the
// state, which stay in registers. The CTA makes keys, queries and gates of a few tokens at once, and asks for the next
// ones before it computes.
namespace attnops {

inline constexpr int kWalkTokens = 8;  // of a tile

template <int kMaxKeys, bool kChannels>
struct WalkShared {
  static constexpr int kRows = kStepThreads / (kMaxKeys / kLaneElements) * kStepRows;  // of a CTA
  alignas(16) float key[kWalkTokens][kMaxKeys];
  alignas(16) float query[kWalkTokens][kMaxKeys];
  alignas(16) float decay[kWalkTokens][kChannels ? kMaxKeys : 4];
  float value[kWalkTokens][kRows], out[kWalkTokens][kRows];
  float coefficient[kWalkTokens], key_query[kWalkTokens];
};

// A tile's inputs on their way: a warp has whole tokens, a lane every 32nd column of them.
template <int kMaxKeys, bool kDelta, bool kChannels>
struct WalkInputs {
  static constexpr int kWarps = kStepThreads / 32, kOwn = kWalkTokens / kWarps, kEach = kMaxKeys / 32;
  using Shared = WalkShared<kMaxKeys, kChannels>;
  static constexpr int kValues = (kWalkTokens * Shared::kRows + kStepThreads - 1) / kStepThreads;
  float key[kOwn][kEach], query[kOwn][kEach], log_decay[kOwn][kChannels ? kEach : 1], coefficient[kOwn];
  float value[kValues];

  __device__ void load(const LinearStep& p, int head, int64_t first, int count, int first_row) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = head / p.heads_per_group;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int t = warp + i * kWarps;
      const bool real = t < count;
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        const int column = lane + c * 32;
        const bool inside = real && column < p.key_dim;
        key[i][c] = inside ? load_row(p.dtype, p.k, first + t, group, column) : 0.f;
        query[i][c] = inside ? load_row(p.dtype, p.q, first + t, group, column) : 0.f;
        if constexpr (kChannels) log_decay[i][c] = inside ? token_log_decay(p, first + t, head, column) : 0.f;
      }
      coefficient[i] = 0.f;
      if (!real) continue;
      if constexpr (kChannels) {
        coefficient[i] = token_coefficient<kDelta>(p, first + t, head);
      } else {
        const TokenGate gate = token_gate<kDelta>(p, first + t, head);
        coefficient[i] = gate.coefficient;
        log_decay[i][0] = gate.log_decay;
      }
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int at = i * kStepThreads + threadIdx.x, t = at / Shared::kRows, row = first_row + at % Shared::kRows;
      value[i] = t < count && row < p.value_dim ? load_row(p.dtype, p.v, first + t, head, row) : 0.f;
    }
  }

  __device__ void put(const LinearStep& p, Shared& to, int count) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int t = warp + i * kWarps;
      float sums[3] = {};
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        sums[0] += key[i][c] * key[i][c];
        sums[1] += query[i][c] * query[i][c];
        sums[2] += key[i][c] * query[i][c];
      }
#pragma unroll
      for (int s = 0; s < 3; ++s) sums[s] = sum_of_lanes<32>(sums[s]);
      const float key_scale = p.normalize ? rsqrtf(sums[0] + kNormEpsilon) : 1.f;
      const float query_scale = p.scale * (p.normalize ? rsqrtf(sums[1] + kNormEpsilon) : 1.f);
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        to.key[t][lane + c * 32] = key[i][c] * key_scale;
        to.query[t][lane + c * 32] = query[i][c] * query_scale;
        if constexpr (kChannels) to.decay[t][lane + c * 32] = expf(log_decay[i][c]);
      }
      if (lane != 0) continue;
      if (!kChannels && t < count) to.decay[t][0] = expf(log_decay[i][0]);
      to.coefficient[t] = coefficient[i];
      to.key_query[t] = sums[2] * key_scale * query_scale;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int at = i * kStepThreads + threadIdx.x;
      if (at < kWalkTokens * Shared::kRows) to.value[at / Shared::kRows][at % Shared::kRows] = value[i];
    }
  }
};

// One token through a thread's rows of the state.
template <int kMaxKeys, bool kDelta, bool kChannels>
__device__ __forceinline__ void walk_token(float (&state)[kStepRows][kLaneElements],
                                           WalkShared<kMaxKeys, kChannels>& shared, int t, int lane, int group) {
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kStepThreads / kLanes;
  using Part = RowPart<float, kLanes>;
  const float factor = kChannels ? 1.f : shared.decay[t][0];
  float by_key[kStepRows] = {}, by_query[kStepRows] = {}, keys[kLaneElements];
#pragma unroll
  for (int j = 0; j < kLaneElements; j += 4) {
    const int column = Part::column(lane, j);
    float key[4], query[4], decay[4];
    load_shared(key, &shared.key[t][column]);
    load_shared(query, &shared.query[t][column]);
    if constexpr (kChannels) load_shared(decay, &shared.decay[t][column]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keys[j + i] = key[i];
#pragma unroll
      for (int r = 0; r < kStepRows; ++r) {
        float& s = state[r][j + i];
        s *= kChannels ? decay[i] : factor;
        by_key[r] = fmaf(s, key[i], by_key[r]);
        by_query[r] = fmaf(s, query[i], by_query[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kStepRows; ++r) {
    const int row = group + r * kGroups;
    by_query[r] = sum_of_lanes<kLanes>(by_query[r]);
    const float value = shared.value[t][row];
    const float update = shared.coefficient[t] * (kDelta ? value - sum_of_lanes<kLanes>(by_key[r]) : value);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) state[r][i] = fmaf(update, keys[i], state[r][i]);
    if (lane == 0) shared.out[t][row] = fmaf(update, shared.key_query[t], by_query[r]);
  }
}

// Grid: row blocks x heads x (requests and one more, for tokens of no request), in one dimension.
template <int kMaxKeys, bool kDelta, bool kChannels>
__global__ void __launch_bounds__(kStepThreads)
    linear_recurrence_kernel(const __grid_constant__ LinearPrefill p, int row_blocks) {
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kStepThreads / kLanes;
  using Part = RowPart<float, kLanes>;
  using Shared = WalkShared<kMaxKeys, kChannels>;
  __shared__ Shared shared;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int row_block = blockIdx.x % row_blocks, work = blockIdx.x / row_blocks;
  const int head = work % step.num_heads, place = work / step.num_heads, first_row = row_block * Shared::kRows;
  if (place == step.batch_size) {
    clear_tokens(step, head, 0, p.first_token(0), first_row, Shared::kRows);
    return clear_tokens(step, head, p.first_token(step.batch_size), p.num_tokens, first_row, Shared::kRows);
  }
  if (step.report != nullptr && row_block == 0 && head == 0 && threadIdx.x == 0) {
    p.check(kDelta ? kReportDeltaPrefill : kReportSsdPrefill, place, step.report);
  }
  const int request = p.plan != nullptr ? p.plan[place] : place;
  if (request < 0 || request >= step.batch_size) return;
  const int64_t first = p.first_token(request), last = p.first_token(request + 1), prefix = p.prefix(request);
  const int64_t slot = step.state_indices[request];
  if (!p.in_pool(slot)) return clear_tokens(step, head, first, last, first_row, Shared::kRows);
  if (last <= first) return;

  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const auto each_element = [&](int64_t of_slot, auto&& body) {
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) {
      const int row = first_row + group + r * kGroups;
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        const int column = Part::column(lane, i);
        if (row >= step.value_dim || column >= step.key_dim) continue;
        body(r, i, state_at(step, of_slot, head) + row * step.stride_row + column);
      }
    }
  };
  float state[kStepRows][kLaneElements] = {};
  const auto save = [&](int64_t to) {
    each_element(to, [&](int r, int i, int64_t at) { store_as(step.state_dtype, step.states, at, state[r][i]); });
  };
  if (prefix != 0) {
    each_element(slot, [&](int r, int i, int64_t at) { state[r][i] = load_as(step.state_dtype, step.states, at); });
  }
  const auto tile_end = [&](int64_t t) {
    const int64_t checkpoint = t + kChunk - (prefix + t - first) % kChunk;
    return min_of(min_of(t + kWalkTokens, last), checkpoint);
  };
  WalkInputs<kMaxKeys, kDelta, kChannels> inputs;
  inputs.load(step, head, first, static_cast<int>(tile_end(first) - first), first_row);
  for (int64_t t = first; t < last;) {
    const int64_t end = tile_end(t);
    const int count = static_cast<int>(end - t);
    inputs.put(step, shared, count);
    __syncthreads();
    if (end < last) inputs.load(step, head, end, static_cast<int>(tile_end(end) - end), first_row);
    for (int i = 0; i < count; ++i) walk_token<kMaxKeys, kDelta, kChannels>(state, shared, i, lane, group);
    __syncthreads();
    for (int i = threadIdx.x; i < count * Shared::kRows; i += kStepThreads) {
      const int token = i / Shared::kRows, row = first_row + i % Shared::kRows;
      if (row >= step.value_dim) continue;
      float out = shared.out[token][i % Shared::kRows];
      if constexpr (!kDelta) {
        if (step.skip != nullptr) out = fmaf(step.skip[head], shared.value[token][i % Shared::kRows], out);
        if (step.z.data != nullptr) {
          const float z = load_row(step.dtype, step.z, t + token, head, row);
          out *= z * sigmoid(z);
        }
      }
      store_as(step.dtype, step.out, (t + token) * step.out_stride_request + head * step.out_stride_head + row, out);
    }
    __syncthreads();
    t = end;
    const int64_t kept = p.checkpoint(request, prefix + t - first);
    if (kept >= 0) save(kept);
  }
  save(slot);
}

template <int kMaxKeys, bool kDelta, bool kChannels>
void launch_linear_recurrence(const char* what, const LinearPrefill& p, cudaStream_t stream) {
  const int row_blocks = ceil_div(p.step.value_dim, WalkShared<kMaxKeys, kChannels>::kRows);
  const int64_t blocks = (int64_t{p.step.batch_size} + 1) * p.step.num_heads * row_blocks;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(what) + ": more than 2^31 blocks of rows");
  const LaunchShape shape{
      .blocks = static_cast<int>(blocks), .threads = kStepThreads, .shared_bytes = 0, .max_shared_bytes = 0};
  launch_dependent<&linear_recurrence_kernel<kMaxKeys, kDelta, kChannels>>(what, shape, stream, p, row_blocks);
}

}  // namespace attnops
