#pragma once
#include "xqa_decode/sm90/short_works.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// Short works over e4m3 pages, head dims 65 to 128 and up to 16 rows, in a launch ahead of the one for all others:
// within that one LoneWarp's registers slow the rest down. Both launches find out by themselves which works these are.
struct LoneWorks {
  using T = __half;
  static constexpr bool kFp8 = true;
  static constexpr int kHeadDim = 128, kRows = 16;
  static constexpr int kWarps = 8, kCtasPerSm = 2;
};

// A CTA for each part of the plan.
template <class Tr>
__global__ void __launch_bounds__(Tr::kWarps * 32, Tr::kCtasPerSm)
    xqa_lone_works_kernel(const __grid_constant__ Params p, const __grid_constant__ Shape shape,
                          const __grid_constant__ Boxes boxes) {
  __shared__ int4 queues[Tr::kWarps][LoneWarp<Tr>::kQueueBytes / 16];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int part = blockIdx.x;
  const PartEntry entry(p, shape, part);
  if (!entry.has_work) return;
  const ShortPart found = find_short(p, shape, entry, true, lane);
  if (found == ShortPart::kNone) return;
  const WholeWorks whole(entry);
  LoneWarp<Tr>(p, shape, boxes, part, warp, Tr::kWarps, queues[warp], lane)
      .run(whole.begin, whole.end, found == ShortPart::kAll ? INT_MAX : kMostShortTokens);
}

}  // namespace attnops::xqa_decode::sm90::fp8
