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

template <bool kDelta>
__device__ __forceinline__ TokenGate token_gate(const LinearStep& p, int64_t token, int head) {
  TokenGate gate;
  gate.coefficient = token_coefficient<kDelta>(p, token, head);
  gate.log_decay = kDelta ? token_log_decay(p, token, head, 0) : rate_times(p.a_log[head], gate.coefficient);
  return gate;
}

// Zeros for tokens [begin, end) and columns [first, first + columns) of a head, by all threads of the CTA.
__device__ __forceinline__ void clear_tokens(const LinearStep& p, int head, int64_t begin, int64_t end, int first,
                                             int columns) {
  const int width = min_of(columns, p.value_dim - first);
  if (width <= 0) return;
  for (int64_t i = threadIdx.x; i < (end - begin) * width; i += blockDim.x) {
    const int64_t to = (begin + i / width) * p.out_stride_request + head * p.out_stride_head;
    store_as(p.dtype, p.out, to + first + i % width, 0.f);
  }
}

// A state as it lies in the pool.
__device__ __forceinline__ int64_t state_at(const LinearStep& p, int64_t slot, int head) {
  return slot * p.stride_slot + head * p.stride_head;
}

}  // namespace attnops
