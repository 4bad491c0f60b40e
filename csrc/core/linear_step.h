#pragma once
#include <cmath>
#include <cstdint>

#include "core/types.h"

// One token per request through a linear recurrence with a state S [value_dim, key_dim] per head:
//   S = decay S;  u = coefficient (v - S k) in the delta rule, coefficient v in SSD;  S += u k^T;  out = scale S q.
// The delta rule is arXiv 2412.06464, equation 10, with the gate of 2510.26692 per key channel; SSD is arXiv
// 2405.21060, where k is B, q is C, v is x and the coefficient is dt.
namespace attnops {

inline constexpr int kMaxStateDim = 256;  // of keys and of values

// A tensor of one row per request and head: strides in elements, the last dimension dense.
struct StepRows {
  const void* data;
  int64_t stride_request, stride_head;
};

struct LinearStep {
  int batch_size, num_heads;  // heads of values
  int heads_per_group;        // that share q and k
  int key_dim, value_dim;
  DType dtype, state_dtype;  // of q, k, v, z and out; of the states
  DType gate_dtype;          // of a and b: `dtype`, or float32

  StepRows q, k, v;  // [B, groups, key_dim] twice, [B, num_heads, value_dim]
  void* out;         // [B, num_heads, value_dim]
  int64_t out_stride_request, out_stride_head;

  void* states;  // [num_slots, num_heads, value_dim, key_dim], key_dim dense
  int64_t num_slots, stride_slot, stride_head, stride_row;
  const int32_t* state_indices;      // [B]; below 0: the row is padding, nothing is touched and out is 0
  const int32_t* out_state_indices;  // [B], or null: where the new state goes; below 0: nowhere

  StepRows a;             // delta rule: gates; SSD: dt; data null: dt is 1
  StepRows b;             // delta rule: logits of beta
  bool gate_per_channel;  // `a` has a value per key channel
  const float* a_log;     // [num_heads]; delta rule: null makes a the log of the decay, and b beta. SSD: A itself
  const float* dt_bias;   // [num_heads], or [num_heads, key_dim] with gates per channel; null: 0
  float lower_bound;      // below 0: the gate is lower_bound sigmoid(...); 0: by softplus
  float scale;            // of q
  bool normalize;         // q and k by their l2 norms
  const float* skip;      // SSD's D [num_heads]; null: 0
  StepRows z;             // SSD's output gate, [B, num_heads, value_dim]; data null: none
  bool softplus;          // SSD: of dt
  // On CUDA: q, k and v alone are made by the launch before, which itself waits for all that came before it.
  bool behind_convolution;
  int32_t* report;
};

inline constexpr float kNormEpsilon = 1e-6f;  // inside the root, as the models have it

ATTNOPS_HOST_DEVICE inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Linear above 20, where log1p(exp(x)) is x in float32.
ATTNOPS_HOST_DEVICE inline float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// A product of a rate and a time that is 0 where one factor is 0, also where the other is infinite.
ATTNOPS_HOST_DEVICE inline float rate_times(float rate, float time) {
  return rate == 0.f || time == 0.f ? 0.f : rate * time;
}

// Natural log of the delta rule's decay of one head or channel, at most 0.
ATTNOPS_HOST_DEVICE inline float log_decay(float a, bool has_a_log, float a_log, float bias, float lower_bound) {
  if (!has_a_log) return a;
  const float rate = expf(a_log);
  return lower_bound < 0.f ? lower_bound * sigmoid(rate * (a + bias)) : -rate_times(rate, softplus(a + bias));
}

}  // namespace attnops
