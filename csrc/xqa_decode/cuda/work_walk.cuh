#pragma once
#include "scheduler/split_kv_bounds.h"
#include "xqa_decode/cuda/traits.cuh"
#include "xqa_decode/plan.h"

namespace attnops::xqa_decode {

// Every `stride`-th work of a part of the plan, where the part has only whole works: what PieceWalk is for all threads,
// for a warp alone. Balanced mode.
class WorkWalk {
 public:
  __device__ __forceinline__ WorkWalk(const Params& p, const Shape& shape, const SplitKvEntry& entry, int part,
                                      int first, int stride)
      : p_(p),
        by_kv_heads_(shape.by_kv_heads),
        side_by_side_(shape.heads_side_by_side),
        stride_(stride),
        next_(entry.begin_work + first),
        end_(entry.end_work) {
    if (side_by_side_) next_kv_head_ = part - shape.by_kv_heads.divide(part) * p.num_kv_heads;
    look_ahead();
  }

  // Goes to the next work; false when there is none.
  __device__ __forceinline__ bool next() {
    if (next_ >= end_) return false;
    request_ = next_request_, kv_head_ = next_kv_head_, length_ = length_of(next_length_);
    keys_ = visible_keys(length_, p_.seqlen_q, p_.window_left);
    keys_.end = min_of(keys_.end, p_.page_table.num_tokens(request_));
    next_ += stride_;
    look_ahead();
    return true;
  }

  __device__ int work() const { return request_ * p_.num_kv_heads + kv_head_; }
  __device__ int request() const { return request_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int length() const { return length_; }
  __device__ const KvRange& keys() const { return keys_; }  // that some row of the request may see
  __device__ int first_token() const { return keys_.begin / kPlanTileTokens * kPlanTileTokens; }
  __device__ int end_token() const { return keys_.end; }
  __device__ bool overflows() const { return false; }
  __device__ void walk_runs(int) {}

 private:
  // Asks for the length of the next work's request: nobody has to wait for it yet.
  __device__ __forceinline__ void look_ahead() {
    if (next_ >= end_) return;
    if (side_by_side_) {
      next_request_ = next_;
    } else {
      next_request_ = by_kv_heads_.divide(next_);
      next_kv_head_ = next_ - next_request_ * p_.num_kv_heads;
    }
    next_length_ = __ldg(p_.cache_seqlens + next_request_);
  }

  const Params& p_;
  const Divisor& by_kv_heads_;
  bool side_by_side_;  // the heads of a request: a work of the plan is then a whole request
  int stride_, next_, end_;
  int next_request_ = 0, next_kv_head_ = 0, next_length_ = 0;
  int request_ = 0, kv_head_ = 0, length_ = 0;
  KvRange keys_{0, 0};
};

}  // namespace attnops::xqa_decode
