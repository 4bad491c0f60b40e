#pragma once

namespace attnops {

// The sum of `value` over all threads; `before` gets the sum over the threads before this one. Every thread of the
// block must call it; the shared memory it uses is free again when it returns.
template <int kThreads, typename T>
__device__ T block_exclusive_sum(T value, T* before) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  constexpr int kWarps = kThreads / 32;
  __shared__ T warp_totals[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  T inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  // Every warp adds up the totals for itself: one barrier less than electing a warp to do it.
  T warp_total = lane < kWarps ? warp_totals[lane] : T{0};
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) {
    const T other = __shfl_up_sync(~0u, warp_total, step);
    if (lane >= step) warp_total += other;
  }
  const T warps_before = __shfl_sync(~0u, warp_total, warp == 0 ? 0 : warp - 1);
  const T total = __shfl_sync(~0u, warp_total, kWarps - 1);
  __syncthreads();
  *before = (warp == 0 ? T{0} : warps_before) + inclusive - value;
  return total;
}

}  // namespace attnops
