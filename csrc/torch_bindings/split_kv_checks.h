#pragma once
#include <algorithm>

#include "scheduler/split_kv.h"
#include "torch_bindings/check.h"

namespace attnops {

// The checked tensors of a split-KV planning op, the same for every decode family.
struct SplitKvPlanTensors {
  int32_t* tile_scheduler_metadata;  // [num_sm_parts, 8]
  int32_t* num_splits;               // [B + 1]
  const int32_t* cache_seqlens;      // [B]
  int num_sm_parts, batch_size;
};

inline constexpr int64_t kMaxSeqlenQ = 1 << 16;  // keeps row numbers of a work far inside int32
inline constexpr int64_t kMaxWindow = (int64_t{1} << 31) - 1 - kMaxSeqlenQ;

// A kernel may count the splits of a work, at most one per part, in 16 bits of its semaphore.
inline constexpr int64_t kMaxSmParts = (1 << 16) - 1;

inline void check_split_tokens(const char* op, int64_t fixed_split_tokens, int tile_tokens) {
  if (fixed_split_tokens < 0 || fixed_split_tokens % tile_tokens != 0 || fixed_split_tokens > INT32_MAX) {
    fail(op, "fixed_split_tokens must be 0 (balanced) or a positive multiple of " + std::to_string(tile_tokens) +
                 ", got " + std::to_string(fixed_split_tokens));
  }
}

// The same for an op that also takes a number of cuts.
inline void check_splits(const char* op, int64_t fixed_split_tokens, int tile_tokens) {
  if (fixed_split_tokens < -int64_t{kMaxCuts} * (1 + kMaxLeastCut) ||
      (fixed_split_tokens > 0 && fixed_split_tokens % tile_tokens != 0) || fixed_split_tokens > INT32_MAX) {
    fail(op, "fixed_split_tokens must be 0 (balanced), a positive multiple of " + std::to_string(tile_tokens) +
                 " (tokens of a cut) or -1 to -" + std::to_string(kMaxCuts) + " (at most so many cuts), got " +
                 std::to_string(fixed_split_tokens) + ". Less " + std::to_string(kMaxCuts) +
                 " for each tile that a cut must have, up to " + std::to_string(kMaxLeastCut));
  }
}

// Rows of out_partial that a plan may need, as far as shapes say; `what` says why.
struct LeastPartials {
  int64_t rows;
  const char* what;
};

inline LeastPartials least_partials(int64_t fixed_split_tokens, int64_t num_sm_parts, int64_t num_works) {
  if (fixed_split_tokens == 0) return {2 * num_sm_parts, "two per row of tile_scheduler_metadata"};
  if (fixed_split_tokens < 0) {
    return {CutRule(static_cast<int>(fixed_split_tokens)).most * num_works, "as many cuts as a work may have"};
  }
  return {0, ""};  // the lengths decide
}

// Batch-invariant mode, lengths that the host can read: whether out_partial holds the cuts of all of them.
inline void check_room_for_cuts(const char* op, const SplitKvGeometry& g, const int32_t* cache_seqlens,
                                const int32_t* num_splits, int64_t num_partials) {
  const int64_t rows = int64_t{num_splits[g.num_requests]} * g.works_per_request * g.parts_per_group;
  if (rows <= num_partials) return;
  const int longest = static_cast<int>(std::max_element(cache_seqlens, cache_seqlens + g.num_requests) - cache_seqlens);
  fail(op, "out_partial.shape[0] (num_partials) must be at least " + std::to_string(rows) +
               " for these cache_seqlens, got " + std::to_string(num_partials) + ". Request " +
               std::to_string(longest) + " has " + std::to_string(cache_seqlens[longest]) + " tokens, cut every " +
               std::to_string(g.fixed_split_tiles * g.tile_tokens) + ": allocate the plan with a larger max_seqlen_k");
}

inline SplitKvPlanTensors checked_split_kv_plan(const char* op, const Tensor& tile_scheduler_metadata,
                                                const Tensor& num_splits, const Tensor& cache_seqlens) {
  Dim batch_size("batch_size"), num_sm_parts("num_sm_parts");
  Dim entry_size("entry_size", kSplitKvEntrySize, "a plan row");
  TensorCheck(op, "cache_seqlens", cache_seqlens).dtype({DType::kInt32}).shape({batch_size}).contiguous();
  Dim splits("batch_size + 1", *batch_size + 1, "cache_seqlens");
  TensorCheck(op, "num_splits", num_splits)
      .device_as("cache_seqlens", cache_seqlens)
      .dtype({DType::kInt32})
      .shape({splits})
      .contiguous();
  TensorCheck(op, "tile_scheduler_metadata", tile_scheduler_metadata)
      .device_as("cache_seqlens", cache_seqlens)
      .dtype({DType::kInt32})
      .shape({num_sm_parts, entry_size})
      .size_at_least(0, "num_sm_parts", 1, "a plan has a part")
      .contiguous();
  check_range(op, "num_sm_parts", *num_sm_parts, 1, kMaxSmParts);
  return {.tile_scheduler_metadata = static_cast<int32_t*>(tile_scheduler_metadata.mutable_data_ptr()),
          .num_splits = static_cast<int32_t*>(num_splits.mutable_data_ptr()),
          .cache_seqlens = static_cast<const int32_t*>(cache_seqlens.const_data_ptr()),
          .num_sm_parts = num_sm_parts.as_int(),
          .batch_size = batch_size.as_int()};
}

}  // namespace attnops
