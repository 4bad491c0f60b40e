#pragma once
#include "scheduler/split_kv_bounds.h"
#include "xqa_decode/cuda/traits.cuh"
#include "xqa_decode/plan.h"

// Plans of many works say in which order works should begin, the longest first (`num_splits`). CTAs then take whole
// works from there, one after the other, each when it has time for one. What a work costs need not be known.
namespace attnops::xqa_decode::sm90 {

// Kernels that do so, of few rows and one KV head. Where a plan does not say it they follow its rows.
template <class Base>
struct DealingTraits : Base {
  static constexpr bool kDeals = true;
};

template <class Tr>
constexpr bool deals_works() {
  return requires { requires Tr::kDeals; };
}

struct DealtWork {
  int request, kv_head;
};

// By its place in the order of works.
__device__ __forceinline__ DealtWork dealt_work(const Params& p, const Shape& shape, int place) {
  const int rank = shape.by_kv_heads.divide(place);
  return {at_most(__ldg(p.num_splits + rank), p.batch_size - 1), place - rank * p.num_kv_heads};
}

// Places in the order of works that a warp takes for its CTA, of the first `works`. Two of each CTA are its own, all
// others are counted by the first semaphore. Every CTA asks once in vain; the last one makes it zero.
class Tickets {
 public:
  static constexpr int kNone = INT32_MAX;

  __device__ __forceinline__ void ask(const Params& p, int works) {
    if (works > 2 * p.num_sm_parts) pending_ = threadIdx.x % 32 == 0 ? atomicAdd(p.semaphores, 1) : 0;
  }

  // What has been asked for, and asks for the next one; kNone where there is none.
  __device__ __forceinline__ int take(const Params& p, int works) {
    const int taken = __shfl_sync(~0u, pending_, 0), own = 2 * p.num_sm_parts;
    if (taken < 0) return kNone;
    if (taken < works - own) {
      ask(p, works);
      return own + taken;
    }
    if (taken == works - own + p.num_sm_parts - 1 && threadIdx.x % 32 == 0) *p.semaphores = 0;
    pending_ = -1;
    return kNone;
  }

 private:
  int pending_ = -1;
};

}  // namespace attnops::xqa_decode::sm90
