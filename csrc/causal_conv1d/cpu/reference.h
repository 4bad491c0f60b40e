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

// A block's weights and bias, and its sums over windows. All dense over channels.
template <typename T>
struct Block {
  const Params& p;
  int channels;
  T* out;
  float weights[kMaxWidth][kBlock], bias[kBlock];

  Block(const Params& params, int64_t first_channel)
      : p(params),
        channels(static_cast<int>(min_of(p.channels - first_channel, kBlock))),
        out(static_cast<T*>(p.out) + first_channel) {
    const T* weight = static_cast<const T*>(p.weight) + first_channel * p.width;
    const T* added = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + first_channel;
    for (int c = 0; c < channels; ++c) {
      for (int j = 0; j < p.width; ++j) weights[j][c] = to_float(weight[c * p.width + j]);
      bias[c] = added == nullptr ? 0.f : to_float(added[c]);
    }
  }

  // Row t of the output, of the inputs `input(j)`, the oldest first.
  template <typename Input>
  void convolve(int64_t t, const Input& input) const {
    float sum[kBlock];
    for (int c = 0; c < channels; ++c) sum[c] = bias[c];
    for (int j = 0; j < p.width; ++j) {
      const float* row = input(j);
      for (int c = 0; c < channels; ++c) sum[c] += weights[j][c] * row[c];
    }
    if (p.silu) {
      for (int c = 0; c < channels; ++c) sum[c] *= sigmoid(sum[c]);
    }
    for (int c = 0; c < channels; ++c) out[t * p.stride_out + c] = from_float<T>(sum[c]);
  }

  void clear(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t) {
      for (int c = 0; c < channels; ++c) out[t * p.stride_out + c] = from_float<T>(0.f);
    }
  }
};

template <typename T>
void run_block(const Params& p, int64_t request, int64_t first_channel) {
  const Block<T> block(p, first_channel);
  const int channels = block.channels, history = p.width - 1;
  const int64_t begin = p.first_token(request), end = p.first_token(request + 1);
  if (!p.in_pool(request)) return block.clear(begin, end);
  if (end <= begin) return;
  T* states = static_cast<T*>(p.states) + p.state_indices[request] * p.stride_slot + first_channel * p.stride_channel;
  const T* x = static_cast<const T*>(p.x) + first_channel;
  const bool starts_at_zero = p.has_initial_state != nullptr && p.has_initial_state[request] == 0;

  // Row j of the ring is the input of a time that is j modulo the width; times count from `history`.
  float ring[kMaxWidth][kBlock];
  for (int c = 0; c < channels; ++c) {
    for (int j = 0; j < history; ++j) {
      ring[j][c] = starts_at_zero ? 0.f : to_float(states[c * p.stride_channel + j * p.stride_time]);
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    const int64_t time = t - begin + history;
    float* newest = ring[time % p.width];
    for (int c = 0; c < channels; ++c) newest[c] = to_float(x[t * p.stride_x + c]);
    block.convolve(t, [&](int j) { return ring[(time - history + j) % p.width]; });
  }
  const int64_t last = end - begin + history - 1;  // time of the newest input
  for (int j = 0; j < history; ++j) {
    const float* input = ring[(last - history + 1 + j) % p.width];
    for (int c = 0; c < channels; ++c) states[c * p.stride_channel + j * p.stride_time] = from_float<T>(input[c]);
  }
}

// A request's drafts: all inputs first, then each draft's sum and window.
template <typename T>
void run_draft_block(const DraftParams& p, int64_t request, int64_t first_channel) {
  const Params& conv = p.conv;
  const Block<T> block(conv, first_channel);
  const int channels = block.channels, history = conv.width - 1;
  const int64_t begin = conv.first_token(request);
  if (!conv.in_pool(request)) return block.clear(begin, begin + p.drafts);
  const T* states = static_cast<const T*>(conv.states) + conv.state_indices[request] * conv.stride_slot +
                    first_channel * conv.stride_channel;
  const T* x = static_cast<const T*>(conv.x) + first_channel + begin * conv.stride_x;
  T* windows = static_cast<T*>(p.windows) + request * p.stride_request + first_channel * p.stride_channel;

  float inputs[kMaxWidth - 1 + kMaxDrafts][kBlock];  // of the state, then of the drafts
  for (int j = 0; j < history; ++j) {
    for (int c = 0; c < channels; ++c) {
      inputs[j][c] = to_float(states[c * conv.stride_channel + j * conv.stride_time]);
    }
  }
  for (int t = 0; t < p.drafts; ++t) {
    for (int c = 0; c < channels; ++c) inputs[history + t][c] = to_float(x[t * conv.stride_x + c]);
  }
  for (int t = 0; t < p.drafts; ++t) {
    int places[kMaxWidth - 1];
    p.places_of(request, t, history, places);
    const auto input = [&](int j) { return inputs[history + (j == history ? t : places[j])]; };
    block.convolve(begin + t, input);
    T* window = windows + t * p.stride_draft;
    for (int j = 0; j < history; ++j) {
      const float* row = input(j + 1);
      for (int c = 0; c < channels; ++c) window[c * p.stride_channel + j * p.stride_time] = from_float<T>(row[c]);
    }
  }
}

}  // namespace attnops::causal_conv1d::cpu
