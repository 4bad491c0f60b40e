#pragma once
#include "device/common/pdl.cuh"
#include "fmha/cuda/attend.cuh"

namespace attnops::fmha {

// The work of a CTA, which its first thread looks up. False: there is none.
template <typename T, int kKeys>
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
  sm90::clear_padding<T>(p);
  __syncthreads();
  return w.num_tokens > 0;
}

// One CTA per work, in the plan's order: the device starts them so, and SMs that are done early take the next.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
    fmha_mma_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule s,
                    const __grid_constant__ Rows rows) {
  extern __shared__ __align__(128) char shared_memory[];
  Work& w = *reinterpret_cast<Work*>(shared_memory + SharedLayout<Tr>::kWork);
  if (!begin_work<typename Tr::T, Tr::kKeys>(p, s, w)) return;
  Attention<Tr>(p, s, rows, w, shared_memory).run();
}

}  // namespace attnops::fmha
