#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/convert.h"
#include "cpu/linear_step.h"

// A head's vectors of one token, and its state as float32 while tokens pass: what the ops over recurrences share.
namespace attnops::cpu {

using StepRowsFunction = void (*)(const HeadStep&);

// By the current instruction set.
StepRowsFunction step_rows_function();

inline float element(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kFloat16) return to_float(static_cast<const Float16*>(data)[i]);
  return to_float(static_cast<const BFloat16*>(data)[i]);
}

// `count` elements from i on, with one branch for all of them.
inline void elements(DType dtype, const void* data, int64_t i, int count, float* to) {
  const auto convert = [&](const auto* from) {
    for (int j = 0; j < count; ++j) to[j] = to_float(from[i + j]);
  };
  if (dtype == DType::kFloat16) return convert(static_cast<const Float16*>(data));
  if (dtype == DType::kBFloat16) return convert(static_cast<const BFloat16*>(data));
  std::memcpy(to, static_cast<const float*>(data) + i, static_cast<size_t>(count) * 4);
}

inline void put_elements(DType dtype, void* data, int64_t i, int count, const float* from) {
  if (dtype == DType::kFloat16) {
    for (int j = 0; j < count; ++j) static_cast<Float16*>(data)[i + j] = from_float<Float16>(from[j]);
  } else if (dtype == DType::kBFloat16) {
    for (int j = 0; j < count; ++j) static_cast<BFloat16*>(data)[i + j] = from_float<BFloat16>(from[j]);
  } else {
    std::memcpy(static_cast<float*>(data) + i, from, static_cast<size_t>(count) * 4);
  }
}

// A sum of products of float arrays that are zero from their ends to the next multiple of kStepLanes.
inline float dot(const float* a, const float* b, int count) {
  float sums[kStepLanes] = {};
  for (int i = 0; i < count; i += kStepLanes) {
    for (int j = 0; j < kStepLanes; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (int width = kStepLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

inline void* states_of(const LinearStep& p, int64_t slot, int head) {
  return static_cast<unsigned char*>(p.states) + (slot * p.stride_slot + head * p.stride_head) * size_of(p.state_dtype);
}

// The vectors of one head, and what its rows are computed with.
struct Head {
  const LinearStep* p = nullptr;
  int64_t row = 0;  // a request, or a token
  int head = 0;
  alignas(64) float key[kMaxStateDim] = {};
  alignas(64) float query[kMaxStateDim] = {};
  alignas(64) float decay[kMaxStateDim] = {};
  alignas(64) float value[kMaxStateDim] = {};
  alignas(64) float out[kMaxStateDim] = {};
  float coefficient = 0.f, key_query = 0.f;

  float at(const StepRows& rows, int of, int64_t i) const {
    return element(p->dtype, rows.data, row * rows.stride_request + of * rows.stride_head + i);
  }

  float gate_at(const StepRows& rows, int64_t i) const {
    return element(p->gate_dtype, rows.data, row * rows.stride_request + head * rows.stride_head + i);
  }

  void load_rows() {
    const int group = head / p->heads_per_group;
    const auto load = [&](const StepRows& rows, int of, int count, float* to) {
      elements(p->dtype, rows.data, row * rows.stride_request + of * rows.stride_head, count, to);
    };
    load(p->k, group, p->key_dim, key);
    load(p->q, group, p->key_dim, query);
    load(p->v, head, p->value_dim, value);
    float key_scale = 1.f, query_scale = p->scale;
    if (p->normalize) {
      key_scale = 1.f / std::sqrt(dot(key, key, p->key_dim) + kNormEpsilon);
      query_scale *= 1.f / std::sqrt(dot(query, query, p->key_dim) + kNormEpsilon);
    }
    for (int i = 0; i < p->key_dim; ++i) {
      key[i] *= key_scale;
      query[i] *= query_scale;
    }
    key_query = dot(key, query, p->key_dim);
  }

  void delta_gates() {
    const bool logits = p->a_log != nullptr;
    const float b = gate_at(p->b, 0);
    coefficient = logits ? sigmoid(b) : b;
    for (int i = 0; i < p->key_dim; ++i) {
      if (i > 0 && !p->gate_per_channel) {
        decay[i] = decay[0];
        continue;
      }
      const int64_t bias = p->gate_per_channel ? int64_t{head} * p->key_dim + i : head;
      decay[i] = std::exp(log_decay(gate_at(p->a, i), logits, logits ? p->a_log[head] : 0.f,
                                    p->dt_bias != nullptr ? p->dt_bias[bias] : 0.f, p->lower_bound));
    }
  }

  void ssd_gates() {
    float dt = p->a.data != nullptr ? gate_at(p->a, 0) : 1.f;
    if (p->dt_bias != nullptr) dt += p->dt_bias[head];
    coefficient = p->softplus ? softplus(dt) : dt;
    const float factor = std::exp(rate_times(p->a_log[head], coefficient));
    for (int i = 0; i < p->key_dim; ++i) decay[i] = factor;
  }

  void store(bool is_padding) const {
    alignas(64) float x[kMaxStateDim];
    for (int v = 0; v < p->value_dim; ++v) {
      x[v] = is_padding ? 0.f : out[v];
      if (!is_padding && p->skip != nullptr) x[v] += p->skip[head] * value[v];
      if (!is_padding && p->z.data != nullptr) {
        const float z = at(p->z, head, v);
        x[v] *= z * sigmoid(z);
      }
    }
    put_elements(p->dtype, p->out, row * p->out_stride_request + head * p->out_stride_head, p->value_dim, x);
  }
};

// A head's state as float32 while tokens pass, each row wide enough for whole vectors.
struct WideState {
  const LinearStep& step;
  int width;
  alignas(64) float data[kMaxStateDim * kMaxStateDim];

  explicit WideState(const LinearStep& p) : step(p), width((p.key_dim + kStepLanes - 1) / kStepLanes * kStepLanes) {}

  void load(const void* from) {
    for (int v = 0; v < step.value_dim; ++v) {
      float* row = data + v * width;
      std::fill(row, row + width, 0.f);
      if (from == nullptr) continue;
      elements(step.state_dtype, from, v * step.stride_row, step.key_dim, row);
    }
  }

  void save(void* to) const {
    for (int v = 0; v < step.value_dim; ++v) {
      put_elements(step.state_dtype, to, v * step.stride_row, step.key_dim, data + v * width);
    }
  }

  // The vectors of a step over rows [first, first + rows).
  HeadStep at(const Head& token, bool delta, int first, int rows) {
    return {.key = token.key,
            .query = token.query,
            .decay = token.decay,
            .value = token.value + first,
            .out = const_cast<float*>(token.out) + first,
            .from = data + first * width,
            .to = data + first * width,
            .stride_row = width,
            .key_dim = width,
            .value_dim = rows,
            .coefficient = token.coefficient,
            .key_query = token.key_query,
            .dtype = DType::kFloat32,
            .delta = delta};
  }
};

}  // namespace attnops::cpu
