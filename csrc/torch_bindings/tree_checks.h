#pragma once
#include "torch_bindings/split_kv_checks.h"

// Tree masks of the decode families: bits over a request's last `tree_keys` keys, which are its new tokens or more.
namespace attnops {

inline int64_t tree_keys_of(int64_t tree_keys, int64_t seqlen_q) { return tree_keys == 0 ? seqlen_q : tree_keys; }

inline void check_tree_keys(const char* op, int64_t tree_keys, int64_t seqlen_q, int64_t window_left) {
  if (tree_keys == 0 || tree_keys == seqlen_q) return;
  if (tree_keys < seqlen_q || tree_keys > kMaxSeqlenQ) {
    fail(op, "tree_keys must be 0 (as many as new tokens) or in [" + std::to_string(seqlen_q) + " (seqlen_q), " +
                 std::to_string(kMaxSeqlenQ) + "], got " + std::to_string(tree_keys));
  }
  if (window_left >= 0) {
    fail(op, "window_left must be -1 (off) with tree_keys above seqlen_q, got " + std::to_string(window_left));
  }
}

inline void check_mask_bytes(const TensorCheck& mask, int64_t bytes, int64_t tree_keys, int64_t seqlen_q) {
  const int64_t least = (tree_keys + 7) / 8;
  if (bytes >= least) return;
  mask.size_at_least(2, "mask_bytes", least, tree_keys == seqlen_q ? "one bit per new token" : "one bit per tree_keys");
}

// Of a call that brings its mask: a bound layer gets it later.
inline void check_tree_keys_have_mask(const char* op, int64_t tree_keys, bool has_mask) {
  if (tree_keys != 0 && !has_mask) fail(op, "tree_mask must be given with tree_keys, got None");
}

}  // namespace attnops
