#pragma once
#include <cmath>

#include "causal_conv1d/cpu/launch.h"
#include "core/linear_step.h"
#include "core/math.h"
#include "cpu/convert.h"

// The definition of right, and the production kernel too: a request's channels run in blocks, token by token, with the
// window in a buffer, so that every access is dense and the compiler vectorizes over channels.
namespace attnops::causal_conv1d::cpu {

using attnops::cpu::from_float;
using attnops::cpu::to_float;

template <typename T>
void run_block(const Params& p, int64_t request, int64_t first_channel) {
  const int channels = static_cast<int>(min_of(p.channels - first_channel, kBlock));
  const int history = p.width - 1;
  const int64_t begin = p.first_token(request), end = p.first_token(request + 1);
  T* out = static_cast<T*>(p.out) + first_channel;
  if (!p.in_pool(request)) {
    for (int64_t t = begin; t < end; ++t) {
      for (int c = 0; c < channels; ++c) out[t * p.stride_out + c] = from_float<T>(0.f);
    }
    return;
  }
  if (end <= begin) return;
  T* states = static_cast<T*>(p.states) + p.state_indices[request] * p.stride_slot + first_channel * p.stride_channel;
  const T* x = static_cast<const T*>(p.x) + first_channel;
  const T* weight = static_cast<const T*>(p.weight) + first_channel * p.width;
  const T* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + first_channel;
  const bool starts_at_zero = p.has_initial_state != nullptr && p.has_initial_state[request] == 0;

  // Row j of the ring is the input of a time that is j modulo the width; times count from `history`.
  float ring[kMaxWidth][kBlock], weights[kMaxWidth][kBlock];
  for (int c = 0; c < channels; ++c) {
    for (int j = 0; j < history; ++j) {
      ring[j][c] = starts_at_zero ? 0.f : to_float(states[c * p.stride_channel + j * p.stride_time]);
    }
    for (int j = 0; j < p.width; ++j) weights[j][c] = to_float(weight[c * p.width + j]);
  }
  for (int64_t t = begin; t < end; ++t) {
    const int64_t time = t - begin + history;
    float* newest = ring[time % p.width];
    for (int c = 0; c < channels; ++c) newest[c] = to_float(x[t * p.stride_x + c]);
    float sum[kBlock];
    for (int c = 0; c < channels; ++c) sum[c] = bias == nullptr ? 0.f : to_float(bias[c]);
    for (int j = 0; j < p.width; ++j) {
      const float* input = ring[(time - history + j) % p.width];
      for (int c = 0; c < channels; ++c) sum[c] += weights[j][c] * input[c];
    }
    if (p.silu) {
      for (int c = 0; c < channels; ++c) sum[c] *= sigmoid(sum[c]);
    }
    for (int c = 0; c < channels; ++c) out[t * p.stride_out + c] = from_float<T>(sum[c]);
  }
  const int64_t last = end - begin + history - 1;  // time of the newest input
  for (int j = 0; j < history; ++j) {
    const float* input = ring[(last - history + 1 + j) % p.width];
    for (int c = 0; c < channels; ++c) states[c * p.stride_channel + j * p.stride_time] = from_float<T>(input[c]);
  }
}

}  // namespace attnops::causal_conv1d::cpu
