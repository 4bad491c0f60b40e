#include "cpu/linear_step.h"

#include <algorithm>
#include <initializer_list>

#include "cpu/convert.h"
#include "cpu/isa.h"
#include "cpu/linear_step_rows.h"

namespace attnops::cpu {

void step_rows_scalar(const HeadStep& head) { step_rows_here(head); }

namespace {

using StepRowsFunction = void (*)(const HeadStep&);

StepRowsFunction step_rows_function() {
  const Isa isa = current_isa();
  return isa == Isa::kScalar ? &step_rows_scalar : isa == Isa::kAvx2 ? &avx2_step_rows : &avx512_step_rows;
}

float element(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kFloat16) return to_float(static_cast<const Float16*>(data)[i]);
  return to_float(static_cast<const BFloat16*>(data)[i]);
}

void put_element(DType dtype, void* data, int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[i] = x;
  } else if (dtype == DType::kFloat16) {
    static_cast<Float16*>(data)[i] = from_float<Float16>(x);
  } else {
    static_cast<BFloat16*>(data)[i] = from_float<BFloat16>(x);
  }
}

void* states_of(const LinearStep& p, int64_t slot, int head) {
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

  void load_rows() {
    const int group = head / p->heads_per_group;
    float key_norm = 0.f, query_norm = 0.f;
    for (int i = 0; i < p->key_dim; ++i) {
      key[i] = at(p->k, group, i);
      query[i] = at(p->q, group, i);
      key_norm += key[i] * key[i];
      query_norm += query[i] * query[i];
    }
    for (int i = 0; i < p->value_dim; ++i) value[i] = at(p->v, head, i);
    const float key_scale = p->normalize ? 1.f / std::sqrt(key_norm + kNormEpsilon) : 1.f;
    const float query_scale = p->scale * (p->normalize ? 1.f / std::sqrt(query_norm + kNormEpsilon) : 1.f);
    for (int i = 0; i < p->key_dim; ++i) {
      key[i] *= key_scale;
      query[i] *= query_scale;
      key_query += key[i] * query[i];
    }
  }

  void delta_gates() {
    const bool logits = p->a_log != nullptr;
    const float b = at(p->b, head, 0);
    coefficient = logits ? sigmoid(b) : b;
    for (int i = 0; i < p->key_dim; ++i) {
      if (i > 0 && !p->gate_per_channel) {
        decay[i] = decay[0];
        continue;
      }
      const int64_t bias = p->gate_per_channel ? int64_t{head} * p->key_dim + i : head;
      decay[i] = std::exp(log_decay(at(p->a, head, i), logits, logits ? p->a_log[head] : 0.f,
                                    p->dt_bias != nullptr ? p->dt_bias[bias] : 0.f, p->lower_bound));
    }
  }

  void ssd_gates() {
    float dt = p->a.data != nullptr ? at(p->a, head, 0) : 1.f;
    if (p->dt_bias != nullptr) dt += p->dt_bias[head];
    coefficient = p->softplus ? softplus(dt) : dt;
    const float factor = std::exp(rate_times(p->a_log[head], coefficient));
    for (int i = 0; i < p->key_dim; ++i) decay[i] = factor;
  }

  void store(bool is_padding) const {
    const int64_t to = row * p->out_stride_request + head * p->out_stride_head;
    for (int v = 0; v < p->value_dim; ++v) {
      float x = is_padding ? 0.f : out[v];
      if (!is_padding && p->skip != nullptr) x += p->skip[head] * value[v];
      if (!is_padding && p->z.data != nullptr) {
        const float z = at(p->z, head, v);
        x *= z * sigmoid(z);
      }
      put_element(p->dtype, p->out, to + v, x);
    }
  }
};

}  // namespace

void linear_step_heads(const LinearStep& p, bool delta, int64_t begin, int64_t end) {
  const StepRowsFunction step_rows = step_rows_function();
  for (int64_t i = begin; i < end; ++i) {
    Head head{.p = &p, .row = i / p.num_heads, .head = static_cast<int>(i % p.num_heads)};
    const int64_t source = p.state_indices[head.row];
    const int64_t target = p.out_state_indices == nullptr ? source : p.out_state_indices[head.row];
    const auto in_pool = [&](int64_t slot) { return slot >= 0 && slot < p.num_slots; };
    if (in_pool(source)) {
      head.load_rows();
      delta ? head.delta_gates() : head.ssd_gates();
      step_rows({.key = head.key,
                 .query = head.query,
                 .decay = head.decay,
                 .value = head.value,
                 .out = head.out,
                 .from = states_of(p, source, head.head),
                 .to = in_pool(target) ? states_of(p, target, head.head) : nullptr,
                 .stride_row = p.stride_row,
                 .key_dim = p.key_dim,
                 .value_dim = p.value_dim,
                 .coefficient = head.coefficient,
                 .key_query = head.key_query,
                 .dtype = p.state_dtype,
                 .delta = delta});
    }
    head.store(!in_pool(source));
  }
}

namespace {

// Tokens whose vectors are made at once, and rows of a state that then meet all of them while they lie in the first
// cache.
constexpr int kTokens = 16, kRows = 16;

// A head of one request, whose state is float32 while its tokens pass, each row wide enough for whole vectors.
class HeadPrefill {
 public:
  HeadPrefill(const LinearPrefill& p, bool delta, StepRowsFunction step_rows)
      : p_(p),
        delta_(delta),
        step_rows_(step_rows),
        width_((p.step.key_dim + kStepLanes - 1) / kStepLanes * kStepLanes) {}

  void run(int64_t request, int head) {
    const LinearStep& step = p_.step;
    const int64_t first = p_.first_token(request), last = p_.first_token(request + 1);
    const int64_t slot = step.state_indices[request], prefix = p_.prefix(request);
    if (!p_.in_pool(slot)) return clear(head, first, last);
    if (last <= first) return;
    load(prefix == 0 ? nullptr : states_of(step, slot, head));
    for (int64_t t = first; t < last;) {
      const int64_t to_checkpoint = kChunk - (prefix + t - first) % kChunk;
      const int count = static_cast<int>(std::min({int64_t{kTokens}, last - t, to_checkpoint}));
      walk(head, t, count);
      t += count;
      const int64_t kept = p_.checkpoint(request, prefix + t - first);
      if (kept >= 0) save(states_of(step, kept, head));
    }
    save(states_of(step, slot, head));
  }

  void clear(int head, int64_t first, int64_t last) const {
    for (int64_t t = first; t < last; ++t) Head{.p = &p_.step, .row = t, .head = head}.store(true);
  }

 private:
  void load(const void* from) {
    const LinearStep& step = p_.step;
    for (int v = 0; v < step.value_dim; ++v) {
      float* row = state_ + v * width_;
      std::fill(row, row + width_, 0.f);
      if (from == nullptr) continue;
      for (int k = 0; k < step.key_dim; ++k) row[k] = element(step.state_dtype, from, v * step.stride_row + k);
    }
  }

  void save(void* to) const {
    const LinearStep& step = p_.step;
    for (int v = 0; v < step.value_dim; ++v) {
      for (int k = 0; k < step.key_dim; ++k) {
        put_element(step.state_dtype, to, v * step.stride_row + k, state_[v * width_ + k]);
      }
    }
  }

  void walk(int head, int64_t first, int count) {
    const LinearStep& step = p_.step;
    Head tokens[kTokens];
    for (int t = 0; t < count; ++t) {
      tokens[t].p = &step;
      tokens[t].row = first + t;
      tokens[t].head = head;
      tokens[t].load_rows();
      delta_ ? tokens[t].delta_gates() : tokens[t].ssd_gates();
    }
    for (int v = 0; v < step.value_dim; v += kRows) {
      float* rows = state_ + v * width_;
      for (int t = 0; t < count; ++t) {
        step_rows_({.key = tokens[t].key,
                    .query = tokens[t].query,
                    .decay = tokens[t].decay,
                    .value = tokens[t].value + v,
                    .out = tokens[t].out + v,
                    .from = rows,
                    .to = rows,
                    .stride_row = width_,
                    .key_dim = width_,
                    .value_dim = std::min(kRows, step.value_dim - v),
                    .coefficient = tokens[t].coefficient,
                    .key_query = tokens[t].key_query,
                    .dtype = DType::kFloat32,
                    .delta = delta_});
      }
    }
    for (int t = 0; t < count; ++t) tokens[t].store(false);
  }

  const LinearPrefill& p_;
  bool delta_;
  StepRowsFunction step_rows_;
  int width_;
  alignas(64) float state_[kMaxStateDim * kMaxStateDim];
};

}  // namespace

void linear_prefill_heads(const LinearPrefill& p, bool delta, int64_t begin, int64_t end) {
  HeadPrefill prefill(p, delta, step_rows_function());
  const LinearStep& step = p.step;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t request = i / step.num_heads;
    const int head = static_cast<int>(i % step.num_heads);
    if (request < step.batch_size) {
      prefill.run(request, head);
    } else {  // tokens of no request
      prefill.clear(head, 0, p.first_token(0));
      prefill.clear(head, p.first_token(step.batch_size), p.num_tokens);
    }
  }
}

void check_step_slots(const LinearStep& p, ReportOp op, int32_t* report) {
  const int32_t* targets = p.out_state_indices == nullptr ? p.state_indices : p.out_state_indices;
  for (int request = 0; request < p.batch_size; ++request) {
    for (const int64_t slot : {int64_t{p.state_indices[request]}, int64_t{targets[request]}}) {
      if (slot >= p.num_slots) record_fault(report, {op, kReportStateSlot, request, 0, slot, p.num_slots});
    }
    for (int other = 0; other < request && targets[request] >= 0; ++other) {
      if (targets[other] == targets[request]) {
        record_fault(report, {op, kReportSharedSlot, request, other, targets[request], 0});
      }
    }
  }
}

}  // namespace attnops::cpu
