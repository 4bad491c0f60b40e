#pragma once
#include "causal_conv1d/params.h"
#include "device/common/linear_step.cuh"
#include "device/sm90/cluster.cuh"

// linear_step_kernel of the delta rule, whose q, k and v are a convolution's output. The CTAs of a request's group of
// heads are a cluster: each convolves the channels of the group's query and key for itself, and those of its own
// values. One of them moves the state of the shared channels on, when all have read it. Bit for bit the two kernels.
namespace attnops::conv_step::sm90 {

inline constexpr int kMostCtas = 8;  // of a cluster, on any GPU that has them
inline constexpr int kWidth = 4;     // of the convolution
using Token = __nv_bfloat16;

// What a thread reads of a channel: the inputs that its output is a sum over, the oldest first.
struct Window {
  Token at[kWidth], bias;
  Vec<Token, kWidth> weights;
};

// The channels of a request's token; their state lies at `states`.
struct Channels {
  const causal_conv1d::Params& p;
  int64_t request;
  Token* states;

  __device__ Channels(const causal_conv1d::Params& params, int64_t own)
      : p(params),
        request(own),
        states(static_cast<Token*>(p.states) + int64_t{p.state_indices[request]} * p.stride_slot) {}

  __device__ Token* state(int64_t channel, int j) const {
    return states + channel * p.stride_channel + j * p.stride_time;
  }

  // Without a branch, so that no read waits for another; nothing is read where there is no such channel.
  __device__ __forceinline__ Window load(int64_t channel, bool exists) const {
    const Token zero = __float2bfloat16(0.f);
    Window window;
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) window.at[j] = exists ? *state(channel, j) : zero;
    window.at[kWidth - 1] = exists ? static_cast<const Token*>(p.x)[request * p.stride_x + channel] : zero;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) window.weights.data[j] = zero;
    if (exists) window.weights = load_vec<Vec<Token, kWidth>>(static_cast<const Token*>(p.weight) + channel * kWidth);
    window.bias = exists && p.bias != nullptr ? static_cast<const Token*>(p.bias)[channel] : zero;
    return window;
  }

  // Rounded as the op rounds it.
  __device__ __forceinline__ float convolve(const Window& window) const {
    float sum = static_cast<float>(window.bias);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum = fmaf(static_cast<float>(window.weights.data[j]), static_cast<float>(window.at[j]), sum);
    }
    if (p.silu) sum = __fdividef(sum, 1.f + __expf(-sum));
    return static_cast<float>(static_cast<Token>(sum));
  }

  __device__ __forceinline__ void move_on(int64_t channel, const Window& window) const {
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) *state(channel, j) = window.at[j + 1];
  }
};

// Grid: row blocks x heads x requests, in one dimension; clusters of a group's heads.
template <typename State, int kMaxKeys, bool kChannels>
__global__ void __launch_bounds__(kStepThreads, step_ctas(kStepRows))
    conv_step_kernel(const __grid_constant__ causal_conv1d::Params conv, const __grid_constant__ LinearStep p,
                     int row_blocks) {
  constexpr int kRows = kStepRows;
  constexpr int kLanes = kMaxKeys / kLaneElements, kGroups = kStepThreads / kLanes;
  static_assert(kMaxKeys <= kStepThreads && kGroups * kRows <= kStepThreads, "a thread has one column and one value");
  using Part = RowPart<State, kLanes>;
  __shared__ StepColumns<kMaxKeys> columns;
  __shared__ float values[kGroups * kRows];
  __shared__ Token newest[kWidth - 1][2][kMaxKeys];  // of the shared channels, until their state moves on
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int row_block = blockIdx.x % row_blocks, work = blockIdx.x / row_blocks;
  const int head = work % p.num_heads, request = work / p.num_heads, shared_head = head / p.heads_per_group;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, column = threadIdx.x;
  const int first_row = row_block * kGroups * kRows + group;
  const bool first_of_group = row_block == 0 && head % p.heads_per_group == 0;
  if (conv.report != nullptr && first_of_group && shared_head == 0 && threadIdx.x == 0) {
    conv.check(request, conv.report);
  }
  const StepSlots<State> slots(p, conv.op, request, head, false);
  const bool live = slots.from != nullptr, has_column = live && column < p.key_dim;

  float state[kRows][kLaneElements];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r * kGroups;
    Part::template load<true>(state[r], slots.from + int64_t{row} * p.stride_row, lane,
                              live && row < p.value_dim ? p.key_dim : 0);
  }

  const int64_t shared_channels = int64_t{p.num_heads / p.heads_per_group} * p.key_dim;
  const int64_t query_channel = int64_t{shared_head} * p.key_dim + column,
                key_channel = shared_channels + query_channel;
  // A thread's value, from the last thread on.
  const int own = kStepThreads - 1 - static_cast<int>(threadIdx.x), own_row = row_block * kGroups * kRows + own;
  const bool has_value = live && own < kGroups * kRows && own_row < p.value_dim;
  const int64_t value_channel = 2 * shared_channels + int64_t{head} * p.value_dim + own_row;
  const Channels channels(conv, request);
  const Window key_window = channels.load(key_channel, has_column),
               query_window = channels.load(query_channel, has_column),
               value_window = channels.load(value_channel, has_value);
  const auto at = [&](const StepRows& rows, int i) {
    return static_cast<const Token*>(rows.data)[request * rows.stride_request + head * rows.stride_head + i];
  };
  float gate = 0.f, rate = 1.f;  // a of a channel, or of the head
  if (kChannels && column < p.key_dim) gate = static_cast<float>(at(p.a, column));
  if (!kChannels) rate = static_cast<float>(at(p.a, 0));
  const float beta = static_cast<float>(at(p.b, 0));
  const float key = channels.convolve(key_window), query = channels.convolve(query_window);
  if (own < kGroups * kRows) values[own] = channels.convolve(value_window);
  if (has_value) channels.move_on(value_channel, value_window);
  if (first_of_group && has_column) {
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
      newest[j][0][column] = key_window.at[j + 1];
      newest[j][1][column] = query_window.at[j + 1];
    }
  }

  const bool logits = p.a_log != nullptr;
  const float a_log = logits ? p.a_log[head] : 0.f;
  if (column < kMaxKeys) {
    columns.key[column] = key;
    columns.query[column] = query;
    if constexpr (kChannels) {
      const float bias =
          p.dt_bias != nullptr && column < p.key_dim ? p.dt_bias[int64_t{head} * p.key_dim + column] : 0.f;
      columns.decay[column] = column < p.key_dim ? expf(log_decay(gate, logits, a_log, bias, p.lower_bound)) : 0.f;
    }
  }
  float sums[2] = {key * key, query * query};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums[i] = sum_of_lanes<32>(sums[i]);
    if (threadIdx.x % 32 == 0) columns.sums[i][threadIdx.x / 32] = sums[i];
  }
  const float head_bias = !kChannels && p.dt_bias != nullptr ? p.dt_bias[head] : 0.f;
  const float coefficient = logits ? sigmoid(beta) : beta;
  const float factor = kChannels ? 1.f : expf(log_decay(rate, logits, a_log, head_bias, p.lower_bound));
  __syncthreads();
  // What was read of the convolution's state has been used, so it is over, and needs no fence of the whole GPU.
  attnops::sm90::cluster_arrive_relaxed();
  const float key_scale = p.normalize ? rsqrtf(columns.sum(0) + kNormEpsilon) : 1.f;
  const float query_scale = p.scale * (p.normalize ? rsqrtf(columns.sum(1) + kNormEpsilon) : 1.f);

  float update[kRows], by_query[kRows];
  const float key_query = step_rows<Part, true, kChannels, kLanes>(
      state, columns, lane, factor, coefficient, key_scale, query_scale,
      [&](int r) { return values[group + r * kGroups]; }, update, by_query);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r * kGroups;
    if (row >= p.value_dim) continue;
    if (slots.to != nullptr) {
      Part::template store<true>(state[r], slots.to + int64_t{row} * p.stride_row, lane, p.key_dim);
    }
    const float out = fmaf(update[r], key_query, by_query[r]);
    const int64_t to = request * p.out_stride_request + head * p.out_stride_head + row;
    if (lane == 0) store_as(p.dtype, p.out, to, live ? out : 0.f);
  }
  __syncwarp();
  attnops::sm90::cluster_wait();
  if (!first_of_group || !has_column) return;
#pragma unroll
  for (int j = 0; j < kWidth - 1; ++j) {
    *channels.state(key_channel, j) = newest[j][0][column];
    *channels.state(query_channel, j) = newest[j][1][column];
  }
}

}  // namespace attnops::conv_step::sm90
