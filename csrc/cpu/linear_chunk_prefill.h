#pragma once
#include <algorithm>
#include <cfloat>
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
// Where elements are bf16, keys that are alike make L large, and rounding must not grow with it. So U is rounded, with
// the decays up to the chunk's end, while the system is solved: later tokens take the error back. The weights of U are
// split, and so are keys that decay by channel.
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
  float rows[kChunk * kMaxStateDim], columns[kMaxStateDim * kChunk];
  float dots[2 * kChunk * kChunk];  // k_t k_s, q_t k_s
  float l[kChunk * kChunk], p[kChunk * kChunk], p_elements[kChunk * kChunk];
  float p_rest[kChunk * kChunk / 2], key_rest[kMaxStateDim * kChunk / 2], key_rest_panels[kChunk * kMaxStateDim / 2];
  float split[2][kChunk * kMaxStateDim / 2];
  float written[kChunk], unwritten[kChunk];
  float left[kChunk], key_norm[kChunk], query_norm[kChunk];
  float decay[kChunk], coefficient[kChunk], from_begin[kChunk], state_factor[kChunk], out_factor[kChunk];
  float fade[kMaxStateDim];  // the decay from the chunk's begin to its end, by channel
  // With a decay for each channel, see ChunkChannels.
  float keys[kChunk * kMaxStateDim], queries[kChunk * kMaxStateDim], channel_decay[kChunk * kMaxStateDim];
  float by_block[2 * kChunk * kMaxStateDim], by_chunk[2 * kChunk * kMaxStateDim], ahead[kChunk * kMaxStateDim];
  float block[2 * kChunkBlock * kMaxStateDim];
  const void *k_rows[kChunk], *q_rows[kChunk], *v_rows[kChunk], *z_rows[kChunk];
  void* out_rows[kChunk];
  const void* pointers[kMaxStateDim];
  const void* outside[6 * kChunk];
};

// One per thread, for ever: nothing in it outlives a task.
inline ChunkScratch& chunk_scratch_of_thread() {
  thread_local std::unique_ptr<ChunkScratch> scratch;
  if (!scratch) scratch.reset(new ChunkScratch);
  return *scratch;
}

class ChunkPrefill {
 public:
  static bool takes(const LinearStep& p) { return p.key_dim % kKeyMultiple == 0 && p.value_dim % kPanel == 0; }

  ChunkPrefill(const LinearPrefill& p, bool delta, const TileOps& ops, const ChunkKernels& kernels)
      : p_(p.step),
        delta_(delta),
        splits_(delta && ops.split != nullptr),
        ops_(ops),
        kernels_(kernels),
        s_(chunk_scratch_of_thread()) {}

  const TileOps& ops() const { return ops_; }

  // A state [value_dim, key_dim] of a head of the span, to and from the form between chunks.
  void put_state(int of, const float* wide) {
    ops_.transpose(s_.states[of], p_.value_dim, wide, p_.key_dim, p_.value_dim, p_.key_dim);
  }
  void get_state(int of, float* wide) const {
    ops_.transpose(wide, p_.key_dim, s_.states[of], p_.value_dim, p_.key_dim, p_.value_dim);
  }

  // What the heads of a group share: keys and queries of `count` tokens from `first` on. Those of `more` tokens behind
  // them are needed soon.
  void begin_chunk(int group, int64_t first, int count, int more) {
    first_ = first, count_ = count, more_ = more, n_ = count > kKeyMultiple ? kChunk : kKeyMultiple;
    const int keys = p_.key_dim;
    find_rows(p_.k, group, s_.k_rows);
    find_rows(p_.q, group, s_.q_rows);
    kernels_.load_rows(s_.queries, keys, s_.q_rows, n_, keys, keys, p_.dtype, 1.f);
    kernels_.load_rows(s_.keys, keys, s_.k_rows, n_, keys, keys, p_.dtype, 1.f);
    find_norms(s_.queries, s_.query_norm);
    find_norms(s_.keys, s_.key_norm);
    num_outside_ = 0;
    for (int64_t t = first + count; t < first + count + more; ++t) {
      s_.outside[num_outside_++] = row_of(p_.k, group, t);
      s_.outside[num_outside_++] = row_of(p_.q, group, t);
    }
    if (p_.gate_per_channel) return;
    ops_.load_rows(s_.keys_queries, keys, s_.k_rows, n_, keys, keys, p_.dtype, 1.f);
    ops_.load_rows(queries(), keys, s_.q_rows, n_, keys, keys, p_.dtype, 1.f);
    ops_.pack_keys(s_.key_panels, s_.k_rows, n_, keys, keys, p_.dtype);
    find_columns(s_.keys);
    for (int r = 0; r < n_; r += kKeyMultiple) {  // no token meets a later one
      const int columns = r + kKeyMultiple;
      if (delta_) meet(r, kKeyMultiple, columns, at(s_.keys_queries, r * keys), s_.key_panels, false);
      meet(n_ + r, kKeyMultiple, columns, at(queries(), r * keys), s_.key_panels, false);
    }
  }

  // The chunk through head `head`, the `of`-th of the span. `next` comes behind it, or is the span's first head again.
  void take(int head, int of, int next) {
    const int keys = p_.key_dim, values = p_.value_dim;
    float* state = s_.states[of];
    delta_ ? find_delta_gates(head) : find_ssd_gates(head);
    if (p_.gate_per_channel) spread();
    find_factors();
    pack_rows(s_.state_panels, state, keys);
    const int skipped = delta_ ? 0 : n_;
    float* by_queries = s_.by_state + n_ * values;
    find_outside_rows(head);
    if (p_.gate_per_channel) find_next_gates(head, next);
    // Their first bytes, which are all where keys are as wide as values.
    RowsAhead ahead(s_.outside, num_outside_, values * size_of(p_.dtype));
    num_outside_ = 0;
    ops_.gemm_ahead(s_.by_state + skipped * values, values, at(s_.keys_queries, skipped * keys), keys, s_.state_panels,
                    keys, n_ - skipped + count_, values, keys, ahead);
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
    kernels_.load_rows(s_.u, values, s_.v_rows, n_, values, values, p_.dtype, 1.f);
    if (splits_) find_written();
    if (delta_) {
      kernels_.solve({.u = s_.u,
                      .ks = s_.by_state,
                      .l = s_.l,
                      .v_factor = s_.coefficient,
                      .state_factor = s_.state_factor,
                      .written = splits_ ? s_.written : nullptr,
                      .unwritten = s_.unwritten,
                      .ld = n_,
                      .count = count_,
                      .n = values});
    } else {
      kernels_.scale_rows(s_.u, values, s_.coefficient, count_, values);
    }
    if (!p_.gate_per_channel) kernels_.scale_rows(by_queries, values, s_.from_begin, count_, values);
    pack_rows(s_.u_panels, s_.u, n_);
    if (splits_) {
      ops_.split(s_.p_elements, s_.p_rest, s_.p, s_.unwritten, n_, n_);
      weigh_u(by_queries, s_.p_rest);
    } else {
      to_elements(s_.p_elements, s_.p, n_, n_);
    }
    weigh_u(by_queries, s_.p_elements);
    store(head, by_queries);
    if (!is_written_) {
      kernels_.scale_rows(s_.u, values, s_.left, n_, values);
      pack_rows(s_.u_panels, s_.u, n_);
    }
    kernels_.scale_rows(state, values, s_.fade, keys, values);
    if (splits_ && p_.gate_per_channel) {
      ops_.gemm(state, values, s_.key_rest, n_, s_.u_panels, n_, keys, values, n_, true);
    }
    ops_.gemm(state, values, s_.key_columns, n_, s_.u_panels, n_, keys, values, n_, true);
  }

 private:
  // Element i of what is of the tiles' type.
  void* at(void* elements, int i) const { return static_cast<char*>(elements) + i * ops_.element_size; }
  const void* at(const void* elements, int i) const {
    return static_cast<const char*>(elements) + i * ops_.element_size;
  }
  void* queries() const { return at(s_.keys_queries, n_ * p_.key_dim); }

  const char* row_of(const StepRows& rows, int of, int64_t t) const {
    return static_cast<const char*>(rows.data) + (t * rows.stride_request + of * rows.stride_head) * size_of(p_.dtype);
  }

  float gate_at(const StepRows& rows, int head, int t) const {
    return element(p_.gate_dtype, rows.data, (first_ + t) * rows.stride_request + head * rows.stride_head);
  }

  void find_rows(const StepRows& rows, int of, const void** to) const {
    for (int t = 0; t < n_; ++t) to[t] = t < count_ ? row_of(rows, of, first_ + t) : nullptr;
  }

  void find_norms(const float* rows, float* to) const {
    std::fill_n(to, n_, 1.f);
    for (int t = 0; t < n_ && p_.normalize; ++t) {
      const float* row = rows + t * p_.key_dim;
      to[t] = 1.f / std::sqrt(dot(row, row, p_.key_dim) + kNormEpsilon);
    }
  }

  // Of rows [n, key_dim], decayed to the chunk's end by channel.
  void find_columns(const float* rows) {
    ops_.transpose(s_.columns, n_, rows, p_.key_dim, n_, p_.key_dim);
    if (splits_ && p_.gate_per_channel) {
      ops_.split(s_.key_columns, s_.key_rest, s_.columns, nullptr, p_.key_dim, n_);
    } else {
      to_elements(s_.key_columns, s_.columns, n_, p_.key_dim);
    }
  }

  // `count` rows of keys or queries against the first `columns` keys of the panels: rows of `dots` from `row` on.
  void meet(int row, int count, int columns, const void* rows, const void* panels, bool more) {
    ops_.gemm(s_.dots + row * n_, n_, rows, p_.key_dim, panels, p_.key_dim, count, columns, p_.key_dim, more);
  }

  // Adds what the weights make of U.
  void weigh_u(float* to, const void* weights) {
    const int values = p_.value_dim;
    for (int r = 0; r < count_; r += kKeyMultiple) {
      ops_.gemm(to + r * values, values, at(weights, r * n_), n_, s_.u_panels, n_, std::min(kKeyMultiple, count_ - r),
                values, r + kKeyMultiple, true);
    }
  }

  // What rows of U are written with: what is left of them at the chunk's end. Where that is little a power of two is
  // missing, which `left` becomes, and rows go to the state behind one more multiplication.
  void find_written() {
    constexpr float kLittle = 0x1p-64f;
    is_written_ = true;
    for (int t = 0; t < n_; ++t) {
      const float left = s_.left[t], missing = left >= kLittle ? 1.f : left > 0.f ? kLittle : 0.f;
      s_.written[t] = missing > 0.f ? left / missing : 1.f;
      s_.unwritten[t] = 1.f / s_.written[t];
      s_.left[t] = missing;
      is_written_ = is_written_ && (t >= count_ || missing == 1.f);
    }
  }

  void find_delta_gates(int head) {
    const bool has_rate = p_.a_log != nullptr;
    for (int t = 0; t < n_; ++t) s_.coefficient[t] = t < count_ ? gate_at(p_.b, head, t) : 0.f;
    if (has_rate) kernels_.sigmoid(s_.coefficient, n_);
    ChunkGates gates{.x = s_.decay,
                     .bias = nullptr,
                     .n = n_,
                     .has_rate = has_rate,
                     .rate = has_rate ? std::min(std::exp(p_.a_log[head]), FLT_MAX) : 1.f,
                     .lower_bound = p_.lower_bound};
    if (!p_.gate_per_channel) {
      const float bias = has_rate && p_.dt_bias != nullptr ? p_.dt_bias[head] : 0.f;
      for (int t = 0; t < n_; ++t) s_.decay[t] = t < count_ ? gate_at(p_.a, head, t) + bias : 0.f;
      return kernels_.find_decays(gates);
    }
    const int keys = p_.key_dim;
    const int64_t bytes = size_of(p_.gate_dtype);
    for (int t = 0; t < count_; ++t) {
      const int64_t at = (first_ + t) * p_.a.stride_request + head * p_.a.stride_head;
      s_.pointers[t] = static_cast<const char*>(p_.a.data) + at * bytes;
    }
    kernels_.load_rows(s_.channel_decay, keys, s_.pointers, count_, keys, keys, p_.gate_dtype, 1.f);
    gates.n = keys;
    if (has_rate && p_.dt_bias != nullptr) gates.bias = p_.dt_bias + int64_t{head} * keys;
    for (int t = 0; t < count_; ++t) {
      gates.x = s_.channel_decay + t * keys;
      kernels_.find_decays(gates);
    }
    std::fill(s_.channel_decay + count_ * keys, s_.channel_decay + n_ * keys, 1.f);
    std::fill_n(s_.decay, n_, 1.f);
  }

  void find_ssd_gates(int head) {
    const float bias = p_.dt_bias != nullptr ? p_.dt_bias[head] : 0.f;
    for (int t = 0; t < n_; ++t) {
      s_.coefficient[t] = (t < count_ && p_.a.data != nullptr ? gate_at(p_.a, head, t) : 1.f) + bias;
    }
    if (p_.softplus) kernels_.softplus(s_.coefficient, n_);
    for (int t = 0; t < n_; ++t) s_.decay[t] = rate_times(p_.a_log[head], s_.coefficient[t]);
    kernels_.find_decays({.x = s_.decay, .bias = nullptr, .n = n_, .has_rate = false, .rate = 0.f, .lower_bound = 0.f});
  }

  // Factors of rows. Where each channel decays on its own, keys and queries already have the decay from the begin.
  void find_factors() {
    float from_begin = 1.f;
    for (int t = 0; t < count_; ++t) {
      s_.from_begin[t] = from_begin *= s_.decay[t];
      s_.state_factor[t] = s_.coefficient[t] * from_begin * s_.key_norm[t];
      s_.out_factor[t] = p_.scale * s_.query_norm[t];
    }
    if (!p_.gate_per_channel) std::fill_n(s_.fade, p_.key_dim, from_begin);
  }

  // What a head alone has of keys and queries that each of its channels decays: dots, what meets the state, and what
  // is written to it. Tokens of earlier blocks are met by products, those of the own block one by one.
  void spread() {
    const int keys = p_.key_dim;
    const ChunkChannels channels{.keys = s_.keys,
                                 .queries = s_.queries,
                                 .decay = s_.channel_decay,
                                 .fade = s_.fade,
                                 .by_block = s_.by_block,
                                 .queries_by_block = s_.by_block + n_ * keys,
                                 .by_chunk = s_.by_chunk,
                                 .queries_by_chunk = s_.by_chunk + n_ * keys,
                                 .ahead = s_.ahead,
                                 .dots = s_.dots,
                                 .query_dots = s_.dots + n_ * n_,
                                 .num_keys = keys,
                                 .n = n_};
    std::fill_n(s_.fade, keys, 1.f);
    for (int first = 0; first < n_; first += kChunkBlock) {
      const int earlier = static_cast<int>(round_up_to(first, kKeyMultiple));
      if (first > 0 && splits_) {
        ops_.split(s_.split[0], s_.split[1], s_.ahead, nullptr, first, keys);
        pack_ahead(s_.key_panels, s_.split[0], first, earlier, DType::kBFloat16);
        pack_ahead(s_.key_rest_panels, s_.split[1], first, earlier, DType::kBFloat16);
      } else if (first > 0) {
        pack_ahead(s_.key_panels, s_.ahead, first, earlier, DType::kFloat32);
      }
      kernels_.spread_block(channels, first);
      for (int i = 0; i < 2 && first > 0; ++i) {
        to_elements(s_.block, s_.by_block + (i * n_ + first) * keys, keys, kChunkBlock);
        if (splits_) meet(i * n_ + first, kChunkBlock, earlier, s_.block, s_.key_rest_panels, false);
        meet(i * n_ + first, kChunkBlock, earlier, s_.block, s_.key_panels, splits_);
      }
      kernels_.meet_in_block(channels, first);
    }
    to_elements(s_.keys_queries, s_.by_chunk, keys, 2 * n_);
    find_columns(s_.ahead);
  }

  // `count` rows of keys into panels of `columns` keys, of which the others are zeros.
  void pack_ahead(void* panels, const void* rows, int count, int columns, DType dtype) {
    rows_of(rows, count, int64_t{p_.key_dim} * size_of(dtype));
    std::fill(s_.pointers + count, s_.pointers + columns, nullptr);
    ops_.pack_keys(panels, s_.pointers, columns, p_.key_dim, p_.key_dim, dtype);
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
    ops_.pack_values(panels, rows_of(rows, count, int64_t{values} * 4), count, values, values, DType::kFloat32);
  }

  // Rows that are read or written once, and lie far apart.
  void find_outside_rows(int head) {
    const bool has_z = p_.z.data != nullptr;
    find_rows(p_.v, head, s_.v_rows);
    if (has_z) find_rows(p_.z, head, s_.z_rows);
    for (int t = 0; t < count_; ++t) {
      s_.out_rows[t] = const_cast<char*>(row_of({p_.out, p_.out_stride_request, p_.out_stride_head}, head, first_ + t));
      s_.outside[num_outside_++] = s_.v_rows[t];
      if (has_z) s_.outside[num_outside_++] = s_.z_rows[t];
      s_.outside[num_outside_++] = s_.out_rows[t];
    }
  }

  void find_next_gates(int head, int next) {
    const int64_t begin = next > head ? first_ : first_ + count_, end = next > head ? first_ + count_ : begin + more_;
    const int64_t size = size_of(p_.gate_dtype);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t at = t * p_.a.stride_request + next * p_.a.stride_head;
      s_.outside[num_outside_++] = static_cast<const char*>(p_.a.data) + at * size;
    }
  }

  void store(int head, const float* acc) {
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
  bool delta_, splits_, is_written_ = false;
  const TileOps& ops_;
  const ChunkKernels& kernels_;
  ChunkScratch& s_;
  int64_t first_ = 0;
  int count_ = 0, more_ = 0, n_ = 0, num_outside_ = 0;
};

}  // namespace attnops::cpu
