#pragma once
#include "device/common/linear_step.cuh"

// What a token brings to a recurrence, for the kernels that take many of them.
namespace attnops {

__device__ __forceinline__ float load_as(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kBFloat16) return static_cast<float>(static_cast<const __nv_bfloat16*>(data)[i]);
  if (dtype == DType::kFloat16) return static_cast<float>(static_cast<const __half*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

__device__ __forceinline__ float load_row(DType dtype, const StepRows& rows, int64_t token, int head, int i) {
  return load_as(dtype, rows.data, token * rows.stride_request + head * rows.stride_head + i);
}

// The log of a token's decay, and what its value is multiplied with.
struct TokenGate {
  float log_decay, coefficient;
};

template <bool kDelta>
__device__ __forceinline__ float token_coefficient(const LinearStep& p, int64_t token, int head) {
  if constexpr (kDelta) {
    const float b = load_row(p.gate_dtype, p.b, token, head, 0);
    return p.a_log != nullptr ? sigmoid(b) : b;
  } else {
    float dt = p.a.data != nullptr ? load_row(p.gate_dtype, p.a, token, head, 0) : 1.f;
    if (p.dt_bias != nullptr) dt += p.dt_bias[head];
    return p.softplus ? softplus(dt) : dt;
  }
}

// The delta rule's gate of a head, or of a channel of it.
__device__ __forceinline__ float token_log_decay(const LinearStep& p, int64_t token, int head, int channel) {
  const int64_t bias_at = p.gate_per_channel ? int64_t{head} * p.key_dim + channel : head;
  const float bias = p.dt_bias != nullptr ? p.dt_bias[bias_at] : 0.f;
  return log_decay(load_row(p.gate_dtype, p.a, token, head, channel), p.a_log != nullptr,
                   p.a_log != nullptr ? p.a_log[head] : 0.f, bias, p.lower_bound);
}

// Of a head's `a` and `b`, its a_log and dt_bias.
template <bool kDelta>
__device__ __forceinline__ TokenGate gate_of(const LinearStep& p, float a, float b, float a_log, float bias) {
  if constexpr (kDelta) {
    const bool logits = p.a_log != nullptr;
    return {log_decay(a, logits, a_log, bias, p.lower_bound), logits ? sigmoid(b) : b};
  } else {
    const float dt = a + bias, time = p.softplus ? softplus(dt) : dt;
    return {rate_times(a_log, time), time};
  }
}

template <bool kDelta>
__device__ __forceinline__ TokenGate token_gate(const LinearStep& p, int64_t token, int head) {
  const float a = p.a.data != nullptr ? load_row(p.gate_dtype, p.a, token, head, 0) : 1.f;
  const float b = kDelta ? load_row(p.gate_dtype, p.b, token, head, 0) : 0.f;
  return gate_of<kDelta>(p, a, b, p.a_log != nullptr ? p.a_log[head] : 0.f,
                         p.dt_bias != nullptr ? p.dt_bias[head] : 0.f);
}

// Zeros for tokens [begin, end) and columns [first, first + columns) of a head, by some threads of the CTA.
__device__ __forceinline__ void clear_tokens(const LinearStep& p, int head, int64_t begin, int64_t end, int first,
                                             int columns, int thread, int threads) {
  const int width = min_of(columns, p.value_dim - first);
  if (width <= 0) return;
  for (int64_t i = thread; i < (end - begin) * width; i += threads) {
    const int64_t to = (begin + i / width) * p.out_stride_request + head * p.out_stride_head;
    store_as(p.dtype, p.out, to + first + i % width, 0.f);
  }
}

// The same by all of them.
__device__ __forceinline__ void clear_tokens(const LinearStep& p, int head, int64_t begin, int64_t end, int first,
                                             int columns) {
  clear_tokens(p, head, begin, end, first, columns, threadIdx.x, blockDim.x);
}

// A state as it lies in the pool.
__device__ __forceinline__ int64_t state_at(const LinearStep& p, int64_t slot, int head) {
  return slot * p.stride_slot + head * p.stride_head;
}

}  // namespace attnops
