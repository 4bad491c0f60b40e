#include <algorithm>

#include "cpu/linear_head.h"

namespace attnops::cpu {
namespace {

// Tokens whose vectors are made at once, and rows of a state that then meet all of them while they lie in the first
// cache.
constexpr int kTokens = 8, kRows = 16;

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
      fetch(head, t + count, last);
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
  // The rows of the tokens that come next: they lie far apart, and no processor guesses them all.
  void fetch(int head, int64_t first, int64_t last) const {
    const LinearStep& step = p_.step;
    const int group = head / step.heads_per_group, size = size_of(step.dtype);
    const auto touch = [&](const void* data, int64_t stride_token, int64_t stride_head, int of, int64_t t, int count) {
      const char* row = static_cast<const char*>(data) + (t * stride_token + of * stride_head) * size;
      for (int i = 0; i < count * size; i += 64) __builtin_prefetch(row + i);
    };
    for (int64_t t = first; t < std::min(first + kTokens, last); ++t) {
      touch(step.k.data, step.k.stride_request, step.k.stride_head, group, t, step.key_dim);
      touch(step.q.data, step.q.stride_request, step.q.stride_head, group, t, step.key_dim);
      touch(step.v.data, step.v.stride_request, step.v.stride_head, head, t, step.value_dim);
      touch(step.out, step.out_stride_request, step.out_stride_head, head, t, step.value_dim);
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
