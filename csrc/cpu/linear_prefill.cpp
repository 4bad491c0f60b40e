#include <algorithm>
#include <optional>

#include "cpu/isa.h"
#include "cpu/linear_chunk_prefill.h"

namespace attnops::cpu {
namespace {

// Tokens whose vectors are made at once, and rows of a state that then meet all of them while they lie in the first
// cache.
constexpr int kTokens = 8, kRows = 16;

// Fewer tokens up to a multiple of kChunk are taken one by one.
constexpr int kFewestInChunk = 12;

// Heads of one request.
class HeadPrefill {
 public:
  HeadPrefill(const LinearPrefill& p, bool delta, StepRowsFunction step_rows)
      : p_(p), delta_(delta), step_rows_(step_rows), state_(p.step) {
    const Isa isa = current_isa();
    const TileOps* ops = ChunkPrefill::takes(p.step) ? tile_ops(isa, p.step.dtype) : nullptr;
    if (ops == nullptr) return;
    chunks_.emplace(p, delta, *ops, isa == Isa::kAvx2 ? avx2_chunk_kernels() : avx512_chunk_kernels());
  }

  // Heads [head, head + heads) of a group.
  void run(int64_t request, int head, int heads) {
    const int64_t first = p_.first_token(request), last = p_.first_token(request + 1);
    if (!p_.in_pool(p_.step.state_indices[request])) {
      for (int h = head; h < head + heads; ++h) clear(h, first, last);
    } else if (last > first && chunks_ && has_chunk(request, first, last)) {
      take_chunks(request, head, heads, first, last);
    } else if (last > first) {
      for (int h = head; h < head + heads; ++h) take_tokens(request, h, first, last);
    }
  }

  void clear(int head, int64_t first, int64_t last) const {
    for (int64_t t = first; t < last; ++t) Head{.p = &p_.step, .row = t, .head = head}.store(true);
  }

 private:
  // Tokens from t on up to the next multiple of kChunk of what the request has seen.
  int piece(int64_t request, int64_t t, int64_t first, int64_t last) const {
    return static_cast<int>(std::min(last - t, kChunk - (p_.prefix(request) + t - first) % kChunk));
  }

  bool has_chunk(int64_t request, int64_t first, int64_t last) const {
    for (int64_t t = first; t < last; t += piece(request, t, first, last)) {
      if (piece(request, t, first, last) >= kFewestInChunk) return true;
    }
    return false;
  }

  void load(int64_t request, int head) {
    state_.load(p_.prefix(request) == 0 ? nullptr : states_of(p_.step, p_.step.state_indices[request], head));
  }

  void take_tokens(int64_t request, int head, int64_t first, int64_t last) {
    load(request, head);
    for (int64_t t = first; t < last;) {
      const int count = piece(request, t, first, last);
      walk_all(head, t, t + count, last);
      t += count;
      keep(request, head, t - first);
    }
    state_.save(states_of(p_.step, p_.step.state_indices[request], head));
  }

  void take_chunks(int64_t request, int head, int heads, int64_t first, int64_t last) {
    const TileScope scope(chunks_->ops());
    for (int i = 0; i < heads; ++i) {
      load(request, head + i);
      chunks_->put_state(i, state_.data);
    }
    for (int64_t t = first; t < last;) {
      const int count = piece(request, t, first, last);
      const bool whole = count >= kFewestInChunk,
                 kept = p_.checkpoint(request, p_.prefix(request) + t + count - first) >= 0;
      const int more = t + count < last ? piece(request, t + count, first, last) : 0;
      if (whole) chunks_->begin_chunk(head / p_.step.heads_per_group, t, count, more);
      for (int i = 0; i < heads; ++i) {
        if (whole) {
          chunks_->take(head + i, i, head + (i + 1) % heads);
        } else {
          chunks_->get_state(i, state_.data);
          walk_all(head + i, t, t + count, last);
          chunks_->put_state(i, state_.data);
        }
        if (!kept) continue;
        chunks_->get_state(i, state_.data);
        keep(request, head + i, t + count - first);
      }
      t += count;
    }
    for (int i = 0; i < heads; ++i) {
      chunks_->get_state(i, state_.data);
      state_.save(states_of(p_.step, p_.step.state_indices[request], head + i));
    }
  }

  // The state that has seen `tokens` of the request, if it is a checkpoint.
  void keep(int64_t request, int head, int64_t tokens) const {
    const int64_t slot = p_.checkpoint(request, p_.prefix(request) + tokens);
    if (slot >= 0) state_.save(states_of(p_.step, slot, head));
  }

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

  // Tokens [first, end) of a request that ends at `last`.
  void walk_all(int head, int64_t first, int64_t end, int64_t last) {
    for (int64_t t = first; t < end; t += kTokens) {
      const int count = static_cast<int>(std::min<int64_t>(kTokens, end - t));
      fetch(head, t + count, last);
      walk(head, t, count);
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
  std::optional<ChunkPrefill> chunks_;
};

}  // namespace

void linear_prefill_heads(const LinearPrefill& p, bool delta, int64_t begin, int64_t end) {
  HeadPrefill prefill(p, delta, step_rows_function());
  const LinearStep& step = p.step;
  for (int64_t i = begin; i < end;) {
    const int64_t request = i / step.num_heads;
    const int head = static_cast<int>(i % step.num_heads),
              in_group = step.heads_per_group - head % step.heads_per_group;
    const int heads = static_cast<int>(std::min<int64_t>(end - i, std::min(in_group, kHeadsAtOnce)));
    i += heads;
    if (request < step.batch_size) {
      prefill.run(request, head, heads);
      continue;
    }
    for (int h = head; h < head + heads; ++h) {  // tokens of no request
      prefill.clear(h, 0, p.first_token(0));
      prefill.clear(h, p.first_token(step.batch_size), p.num_tokens);
    }
  }
}

}  // namespace attnops::cpu
