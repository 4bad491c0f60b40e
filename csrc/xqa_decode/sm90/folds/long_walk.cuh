#pragma once
#include "xqa_decode/cuda/pieces.cuh"
#include "xqa_decode/sm90/lone_warp.cuh"

namespace attnops::xqa_decode::sm90 {

// The pieces of a part of a batch-invariant plan, but for works that are left to lone warps where `leaves_short` says
// so. All lanes of a warp walk together.
class LongWalk : public PieceWalk {
 public:
  __device__ __forceinline__ LongWalk(const Params& p, const Shape& shape, const PartEntry& entry, int part,
                                      bool leaves_short)
      : PieceWalk(p, shape, entry, part), by_kv_heads_(shape.by_kv_heads), leaves_short_(leaves_short) {}

  // Goes to the next piece; false when there is none.
  __device__ __forceinline__ bool next() {
    if (!leaves_short_) return PieceWalk::next();
#pragma unroll 1
    for (;;) {
      tile_ = end_tile_;
      if (tile_ >= num_tiles_) {
        if (!enter(next_long(work_ + 1))) return false;
      } else if (work_ == entry_.end_work && tile_ >= entry_.end_tile) {
        return false;
      }
      open();
      if (tokens_seen(p_, length_) > kMostInvariantTokens) return true;
      end_tile_ = num_tiles_;  // the part's first work, whose beginning another part may have
    }
  }

 private:
  __device__ __forceinline__ int end_of_works() const { return entry_.end_work + (entry_.end_tile > 0 ? 1 : 0); }

  // The first work from `work` on that is not short; 32 of them are looked at together.
  __device__ __forceinline__ int next_long(int work) const {
    const int lane = threadIdx.x % 32, end = end_of_works();
#pragma unroll 1
    for (; work < end; work += 32) {
      const int own = work + lane, request = group_ > 1 ? own : by_kv_heads_.divide(own);
      const bool is_long = own < end && tokens_seen(p_, __ldg(p_.cache_seqlens + request)) > kMostInvariantTokens;
      const unsigned found = __ballot_sync(~0u, is_long);
      if (found) return work + __ffs(static_cast<int>(found)) - 1;
    }
    return end;
  }

  __device__ __forceinline__ bool enter(int work) {
    if (work >= end_of_works()) return false;
    const int request = group_ > 1 ? work : by_kv_heads_.divide(work);
    if (group_ == 1) kv_head_ = work - request * p_.num_kv_heads;
    if (request != request_) length_ = -1, next_length_ = __ldg(p_.cache_seqlens + request);
    work_ = work, request_ = request, tile_ = 0;
    return true;
  }

  const Divisor& by_kv_heads_;
  const bool leaves_short_;
};

}  // namespace attnops::xqa_decode::sm90
