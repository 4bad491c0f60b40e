#include <algorithm>

#include "cpu/linear_head.h"

namespace attnops::cpu {
namespace {

// Tokens whose vectors are made at once, and rows of a state that then meet all of them while they lie in the first
// cache.
constexpr int kTokens = 16, kRows = 16;

// A head of one request.
class HeadPrefill {
 public:
  HeadPrefill(const LinearPrefill& p, bool delta, StepRowsFunction step_rows)
      : p_(p), delta_(delta), step_rows_(step_rows), state_(p.step) {}

  void run(int64_t request, int head) {
    const LinearStep& step = p_.step;
    const int64_t first = p_.first_token(request), last = p_.first_token(request + 1);
    const int64_t slot = step.state_indices[request], prefix = p_.prefix(request);
    if (!p_.in_pool(slot)) return clear(head, first, last);
    if (last <= first) return;
    state_.load(prefix == 0 ? nullptr : states_of(step, slot, head));
    for (int64_t t = first; t < last;) {
      const int64_t to_checkpoint = kChunk - (prefix + t - first) % kChunk;
      const int count = static_cast<int>(std::min({int64_t{kTokens}, last - t, to_checkpoint}));
      walk(head, t, count);
      t += count;
      const int64_t kept = p_.checkpoint(request, prefix + t - first);
      if (kept >= 0) state_.save(states_of(step, kept, head));
    }
    state_.save(states_of(step, slot, head));
  }

  void clear(int head, int64_t first, int64_t last) const {
    for (int64_t t = first; t < last; ++t) Head{.p = &p_.step, .row = t, .head = head}.store(true);
  }

 private:
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
      const int rows = std::min(kRows, step.value_dim - v);
      for (int t = 0; t < count; ++t) step_rows_(state_.at(tokens[t], delta_, v, rows));
    }
    for (int t = 0; t < count; ++t) tokens[t].store(false);
  }

  const LinearPrefill& p_;
  bool delta_;
  StepRowsFunction step_rows_;
  WideState state_;
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

}  // namespace attnops::cpu
