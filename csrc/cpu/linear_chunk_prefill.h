#pragma once
#include <algorithm>
#include <memory>

#include "cpu/linear_chunk.h"
#include "cpu/linear_head.h"
#include "cpu/tile_ops.h"

// Whole chunks of a prompt by matrix products (arXiv 2412.06464, section 3.3), of the compute type of the tiles. With
// D_ts the decay from token s to t, e_t from the chunk's begin to t:
//   U = (1 + L)^-1 (b V - b e K S),  L_ts = b_t D_ts k_t k_s for s < t;  out = e Q S + (D_ts q_t k_s) U;
//   S = e_last S + (D_last K)^T U.
// Keys and queries go into the products as they are; their norms, decays and the system of equations are float32, and
// so is the state between chunks, [key_dim, value_dim].
namespace attnops::cpu {

inline constexpr int kHeadsAtOnce = 4;  // of a group: they share what keys and queries say to each other

// What a thread needs for a chunk. `float` is the largest element.
struct alignas(64) ChunkScratch {
  float states[kHeadsAtOnce][kMaxStateDim * kMaxStateDim];
  float state_panels[kMaxStateDim * kMaxStateDim];
  float keys_queries[2 * kChunk * kMaxStateDim];  // elements [2 n, key_dim]
  float key_panels[kChunk * kMaxStateDim];
  float key_columns[kMaxStateDim * kChunk];  // elements [key_dim, n]
  float by_state[2 * kChunk * kMaxStateDim];
  float u[kChunk * kMaxStateDim];
  float u_panels[kChunk * kMaxStateDim];
  float rows[kMaxStateDim * kMaxStateDim], more_rows[kMaxStateDim * kChunk];
  float dots[2 * kChunk * kChunk];  // k_t k_s, q_t k_s
  float l[kChunk * kChunk], p[kChunk * kChunk], p_elements[kChunk * kChunk];
  float left[kChunk], key_norm[kChunk], query_norm[kChunk];
  float decay[kChunk], coefficient[kChunk], from_begin[kChunk], state_factor[kChunk], out_factor[kChunk];
  float fade[kMaxStateDim];
  const void *k_rows[kChunk], *q_rows[kChunk], *v_rows[kChunk], *z_rows[kChunk];
  void* out_rows[kChunk];
  const void* pointers[kMaxStateDim];
};

// One per thread, for ever: nothing in it outlives a task.
inline ChunkScratch& chunk_scratch_of_thread() {
  thread_local std::unique_ptr<ChunkScratch> scratch;
  if (!scratch) scratch.reset(new ChunkScratch);
  return *scratch;
}

class ChunkPrefill {
 public:
  static bool takes(const LinearStep& p) {
    return !p.gate_per_channel && p.key_dim % kKeyMultiple == 0 && p.value_dim % kPanel == 0;
  }

  ChunkPrefill(const LinearPrefill& p, bool delta, const TileOps& ops, const ChunkKernels& kernels)
      : p_(p.step), delta_(delta), ops_(ops), kernels_(kernels), s_(chunk_scratch_of_thread()),
        element_(ops.element_size == 2 ? DType::kBFloat16 : DType::kFloat32) {
    head_.p = &p_;
  }

  const TileOps& ops() const { return ops_; }

  // A state [value_dim, key_dim] of a head of the span, to and from the form between chunks.
  void put_state(int of, const float* wide) {
    ops_.transpose(s_.states[of], p_.value_dim, wide, p_.key_dim, p_.value_dim, p_.key_dim);
  }
  void get_state(int of, float* wide) const {
    ops_.transpose(wide, p_.key_dim, s_.states[of], p_.value_dim, p_.key_dim, p_.value_dim);
  }

  // What the heads of a group share: keys and queries of `count` tokens from `first` on.
  void begin_chunk(int group, int64_t first, int count) {
    first_ = first, count_ = count, n_ = count > kKeyMultiple ? kChunk : kKeyMultiple;
    const int keys = p_.key_dim;
    find_rows(p_.k, group, s_.k_rows);
    find_rows(p_.q, group, s_.q_rows);
    ops_.load_rows(s_.keys_queries, keys, s_.k_rows, n_, keys, keys, p_.dtype, 1.f);
    ops_.load_rows(queries(), keys, s_.q_rows, n_, keys, keys, p_.dtype, 1.f);
    ops_.pack_keys(s_.key_panels, s_.k_rows, n_, keys, keys, p_.dtype);
    std::fill_n(s_.key_norm, kChunk, 1.f);
    std::fill_n(s_.query_norm, kChunk, 1.f);
    if (p_.normalize) find_norms(s_.q_rows, s_.query_norm);
    if (p_.normalize) {
      find_norms(s_.k_rows, s_.key_norm);
    } else {
      kernels_.load_rows(s_.rows, keys, s_.k_rows, n_, keys, keys, p_.dtype, 1.f);
    }
    ops_.transpose(s_.more_rows, n_, s_.rows, keys, n_, keys);
    to_elements(s_.key_columns, s_.more_rows, n_, keys);
    for (int r = 0; r < n_; r += kKeyMultiple) {  // no token meets a later one
      const int columns = r + kKeyMultiple;
      if (delta_) {
        ops_.gemm(s_.dots + r * n_, n_, at(s_.keys_queries, r * keys), keys, s_.key_panels, keys, kKeyMultiple, columns,
                  keys, false);
      }
      ops_.gemm(s_.dots + (n_ + r) * n_, n_, at(queries(), r * keys), keys, s_.key_panels, keys, kKeyMultiple, columns,
                keys, false);
    }
  }

  // The chunk through head `head`, the `of`-th of the span.
  void take(int head, int of) {
    const int keys = p_.key_dim, values = p_.value_dim;
    float* state = s_.states[of];
    find_gates(head);
    pack_rows(s_.state_panels, state, keys);
    const int skipped = delta_ ? 0 : n_;
    float* by_queries = s_.by_state + n_ * values;
    ops_.gemm(s_.by_state + skipped * values, values, at(s_.keys_queries, skipped * keys), keys, s_.state_panels, keys,
              n_ - skipped + count_, values, keys, false);
    kernels_.weigh({.keys = s_.dots,
                    .queries = s_.dots + n_ * n_,
                    .decay = s_.decay,
                    .key_norm = s_.key_norm,
                    .coefficient = s_.coefficient,
                    .l = delta_ ? s_.l : nullptr,
                    .p = s_.p,
                    .left = s_.left,
                    .ld = n_,
                    .count = count_});
    find_rows(p_.v, head, s_.v_rows);
    kernels_.load_rows(s_.u, values, s_.v_rows, n_, values, values, p_.dtype, 1.f);
    if (delta_) {
      kernels_.solve({.u = s_.u,
                      .ks = s_.by_state,
                      .l = s_.l,
                      .v_factor = s_.coefficient,
                      .state_factor = s_.state_factor,
                      .ld = n_,
                      .count = count_,
                      .n = values});
    } else {
      kernels_.scale_rows(s_.u, values, s_.coefficient, count_, values);
    }
    kernels_.scale_rows(by_queries, values, s_.from_begin, count_, values);
    pack_rows(s_.u_panels, s_.u, n_);
    to_elements(s_.p_elements, s_.p, n_, n_);
    for (int r = 0; r < count_; r += kKeyMultiple) {
      ops_.gemm(by_queries + r * values, values, at(s_.p_elements, r * n_), n_, s_.u_panels, n_,
                std::min(kKeyMultiple, count_ - r), values, r + kKeyMultiple, true);
    }
    store(head, by_queries);
    kernels_.scale_rows(s_.u, values, s_.left, n_, values);
    pack_rows(s_.u_panels, s_.u, n_);
    std::fill_n(s_.fade, keys, s_.from_begin[count_ - 1]);
    kernels_.scale_rows(state, values, s_.fade, keys, values);
    ops_.gemm(state, values, s_.key_columns, n_, s_.u_panels, n_, keys, values, n_, true);
  }

 private:
  // Element i of what is of the tiles' type.
  void* at(void* elements, int i) const { return static_cast<char*>(elements) + i * ops_.element_size; }
  void* queries() const { return at(s_.keys_queries, n_ * p_.key_dim); }

  const char* row_of(const StepRows& rows, int of, int64_t t) const {
    return static_cast<const char*>(rows.data) + (t * rows.stride_request + of * rows.stride_head) * size_of(p_.dtype);
  }

  void find_rows(const StepRows& rows, int of, const void** to) const {
    for (int t = 0; t < n_; ++t) to[t] = t < count_ ? row_of(rows, of, first_ + t) : nullptr;
  }

  // Leaves the rows as floats in `rows`.
  void find_norms(const void* const* rows, float* to) {
    kernels_.load_rows(s_.rows, p_.key_dim, rows, n_, p_.key_dim, p_.key_dim, p_.dtype, 1.f);
    for (int t = 0; t < n_; ++t) {
      const float* row = s_.rows + t * p_.key_dim;
      to[t] = 1.f / std::sqrt(dot(row, row, p_.key_dim) + kNormEpsilon);
    }
  }

  void find_gates(int head) {
    head_.head = head;
    float from_begin = 1.f;
    for (int t = 0; t < count_; ++t) {
      head_.row = first_ + t;
      delta_ ? head_.delta_gates() : head_.ssd_gates();
      s_.decay[t] = head_.decay[0];
      s_.coefficient[t] = head_.coefficient;
      s_.from_begin[t] = from_begin *= head_.decay[0];
      s_.state_factor[t] = head_.coefficient * from_begin * s_.key_norm[t];
      s_.out_factor[t] = p_.scale * s_.query_norm[t];
    }
  }

  const void* const* rows_of(const void* rows, int count, int64_t bytes) {
    for (int i = 0; i < count; ++i) s_.pointers[i] = static_cast<const char*>(rows) + i * bytes;
    return s_.pointers;
  }

  // [m, k] floats as elements.
  void to_elements(void* to, const float* from, int k, int m) {
    ops_.load_rows(to, k, rows_of(from, m, int64_t{k} * 4), m, k, k, DType::kFloat32, 1.f);
  }

  // `count` rows of value_dim floats into panels.
  void pack_rows(void* panels, const float* rows, int count) {
    const int values = p_.value_dim;
    const void* elements = rows;
    if (ops_.element_size == 2) {
      to_elements(s_.rows, rows, values, count);
      elements = s_.rows;
    }
    ops_.pack_values(panels, rows_of(elements, count, int64_t{values} * ops_.element_size), count, values, values,
                     element_);
  }

  void store(int head, const float* acc) {
    if (p_.z.data != nullptr) find_rows(p_.z, head, s_.z_rows);
    for (int t = 0; t < count_; ++t) {
      s_.out_rows[t] = const_cast<char*>(row_of({p_.out, p_.out_stride_request, p_.out_stride_head}, head, first_ + t));
    }
    kernels_.finish({.acc = acc,
                     .factor = s_.out_factor,
                     .rows = s_.out_rows,
                     .v = p_.skip == nullptr ? nullptr : s_.v_rows,
                     .z = p_.z.data == nullptr ? nullptr : s_.z_rows,
                     .skip = p_.skip == nullptr ? 0.f : p_.skip[head],
                     .count = count_,
                     .n = p_.value_dim,
                     .dtype = p_.dtype});
  }

  const LinearStep& p_;
  bool delta_;
  const TileOps& ops_;
  const ChunkKernels& kernels_;
  ChunkScratch& s_;
  DType element_;
  Head head_;
  int64_t first_ = 0;
  int count_ = 0, n_ = 0;
};

}  // namespace attnops::cpu
