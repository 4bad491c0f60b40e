#include <algorithm>

#include "cpu/linear_head.h"

namespace attnops::cpu {
namespace {

// The drafts of one request through a head.
class HeadVerify {
 public:
  HeadVerify(const LinearVerify& p, bool delta, StepRowsFunction step_rows)
      : p_(p), delta_(delta), step_rows_(step_rows), base_(p.step), state_(p.step) {}

  void run(int64_t request, int head) {
    const LinearStep& step = p_.step;
    const int64_t slot = step.state_indices[request];
    for (int t = 0; t < p_.drafts; ++t) {
      tokens_[t] = {.p = &step, .row = request * p_.drafts + t, .head = head};
      if (slot < 0 || slot >= step.num_slots) tokens_[t].store(true);
    }
    if (slot < 0 || slot >= step.num_slots) return;
    base_.load(states_of(step, slot, head));
    const int length = p_.rings.length(slot, p_.drafts);
    for (int i = 0; i < length; ++i) {
      Head row{.p = &step, .row = 0, .head = head};
      load_ring(p_.step, p_.rings, row, slot, head, i);
      step_rows_(base_.at(row, false, 0, step.value_dim));
    }
    uint32_t seen = ~0u;  // drafts that the state has seen; at first none that a draft could ask for
    for (int t = 0; t < p_.drafts; ++t) {
      Head& token = tokens_[t];
      token.load_rows();
      delta_ ? token.delta_gates() : token.ssd_gates();
      const uint32_t ancestors = p_.ancestors(request, t);
      if (ancestors != seen) {
        std::copy(base_.data, base_.data + step.value_dim * base_.width, state_.data);
        for (int a = 0; a < t; ++a) {
          if ((ancestors >> a & 1u) == 0) continue;
          HeadStep again = state_.at(tokens_[a], false, 0, step.value_dim);
          again.value = p_.rings.u_row(step, slot, head, length + a);
          again.out = unused_;
          again.coefficient = 1.f;
          step_rows_(again);
        }
      }
      HeadStep all = state_.at(token, delta_, 0, step.value_dim);
      all.update = p_.rings.u_row(step, slot, head, length + t);
      step_rows_(all);
      store_ring(token, slot, head, length + t);
      token.store(false);
      seen = ancestors | 1u << t;
    }
  }

  // A row of a ring as a step whose update is its value.
  static void load_ring(const LinearStep& step, const StateRings& rings, Head& row, int64_t slot, int head, int at) {
    const float* u = rings.u_row(step, slot, head, at);
    const float* k = rings.k_row(step, slot, head, at);
    const float* decay = rings.decay_row(step, slot, head, at);
    std::copy(u, u + step.value_dim, row.value);
    std::copy(k, k + step.key_dim, row.key);
    for (int i = 0; i < step.key_dim; ++i) row.decay[i] = decay[rings.per_channel ? i : 0];
    row.coefficient = 1.f;
  }

 private:
  void store_ring(const Head& token, int64_t slot, int head, int at) const {
    const LinearStep& step = p_.step;
    float* decay = p_.rings.decay_row(step, slot, head, at);
    std::copy(token.decay, token.decay + (p_.rings.per_channel ? step.key_dim : 1), decay);
    if (head % step.heads_per_group == 0) {
      std::copy(token.key, token.key + step.key_dim, p_.rings.k_row(step, slot, head, at));
    }
  }

  const LinearVerify& p_;
  bool delta_;
  StepRowsFunction step_rows_;
  WideState base_, state_;
  Head tokens_[kMaxDrafts];
  float unused_[kMaxStateDim];  // what a step that is taken again says to its query
};

}  // namespace

void linear_verify_heads(const LinearVerify& p, bool delta, int64_t begin, int64_t end) {
  HeadVerify verify(p, delta, step_rows_function());
  for (int64_t i = begin; i < end; ++i) verify.run(i / p.step.num_heads, static_cast<int>(i % p.step.num_heads));
}

void linear_commit_heads(const LinearCommit& p, int64_t begin, int64_t end) {
  const StepRowsFunction step_rows = step_rows_function();
  const LinearStep& step = p.step;
  WideState state(step);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t request = i / step.num_heads, slot = step.state_indices[request];
    const int head = static_cast<int>(i % step.num_heads);
    if (slot < 0 || slot >= step.num_slots) continue;
    const int length = p.rings.length(slot, p.drafts), more = p.num_accepted(request);
    if (p.folds(length, more)) {
      if (length + more == 0) continue;
      state.load(states_of(step, slot, head));
      for (int row = 0; row < length + more; ++row) {
        Head update{.p = &step, .row = 0, .head = head};
        HeadVerify::load_ring(step, p.rings, update, slot, head,
                              row < length ? row : p.draft_row(request, length, row - length));
        step_rows(state.at(update, false, 0, step.value_dim));
      }
      state.save(states_of(step, slot, head));
      continue;
    }
    for (int a = 0; a < more; ++a) {  // rising, so that no row is overwritten before it has moved
      const int from = p.draft_row(request, length, a), to = length + a;
      if (from == to) continue;
      const int decays = p.rings.per_channel ? step.key_dim : 1;
      std::copy_n(p.rings.u_row(step, slot, head, from), step.value_dim, p.rings.u_row(step, slot, head, to));
      std::copy_n(p.rings.decay_row(step, slot, head, from), decays, p.rings.decay_row(step, slot, head, to));
      if (head % step.heads_per_group != 0) continue;
      std::copy_n(p.rings.k_row(step, slot, head, from), step.key_dim, p.rings.k_row(step, slot, head, to));
    }
  }
}

}  // namespace attnops::cpu
