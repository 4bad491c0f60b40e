#pragma once
#include "device/common/pdl.cuh"
#include "fmha/cuda/attend.cuh"

namespace attnops::fmha {

// The work of a CTA, which its first thread looks up. False: there is none.
template <int kKeys>
__device__ __forceinline__ bool begin_work(const Params& p, const Schedule& s, Work& w) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    Work found;
    found.num_tokens = 0;
    if (static_cast<int>(blockIdx.x) < s.num_works) {
      if (!sm90::decode_work<kKeys>(p, s, {}, static_cast<int>(blockIdx.x), found)) found.num_tokens = 0;
    }
    w = found;
  }
  __syncthreads();
  return w.num_tokens > 0;
}

// One CTA a work, in the plan's order: the device starts them so, and SMs that are done early take the next.
template <class Tr, Source kSource, int kStages>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
    fmha_mma_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule s,
                    const __grid_constant__ Rows rows) {
  extern __shared__ __align__(128) char shared_memory[];
  Work& w = *reinterpret_cast<Work*>(shared_memory + SharedLayout<Tr>::kWork);
  if (!begin_work<Tr::kKeys>(p, s, w)) {
    sm90::clear_padding<typename Tr::T>(p);
    return;
  }
  Attention<Tr, kSource, kStages, false>(p, s, rows, w, shared_memory).run([&p] {
    sm90::clear_padding<typename Tr::T>(p);
  });
}

// The same where the plan may cut tiles: as many CTAs as run at once take works, then merge the pieces.
template <class Tr, Source kSource, int kStages>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
    fmha_mma_cut_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule s,
                        const __grid_constant__ Rows rows) {
  extern __shared__ __align__(128) char shared_memory[];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const WorkQueue<Tr> queue(p, s, shared_memory + SharedLayout<Tr>::kWork);
  queue.begin();
  sm90::clear_padding<typename Tr::T>(p);
  for (; queue.work().num_tokens >= 0; queue.advance()) {
    Attention<Tr, kSource, kStages, true>(p, s, rows, queue.work(), shared_memory).run([&queue] {
      if (threadIdx.x == 0) queue.find();
    });
  }
  if (queue.pieces() > 0) {
    sm90::merge_pieces<Tr>(p, s, queue.pieces(), shared_memory);
  } else if (threadIdx.x == 0) {
    sm90::leave(p);
  }
}

}  // namespace attnops::fmha
