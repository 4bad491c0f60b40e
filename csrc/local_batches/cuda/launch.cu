#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "local_batches/cuda/launch.h"

namespace attnops::local_batches {
namespace {

constexpr int kThreads = 128;

// A CTA per virtual request, and one for the end. Each finds its request by adding up the chunks of those before, which
// costs a pass over the lengths: they are few, and lie in L2.
__global__ void __launch_bounds__(kThreads) build_kernel(const __grid_constant__ Params p) {
  __shared__ int64_t sums[kThreads];
  __shared__ int64_t found_request, found_index;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t v = blockIdx.x;
  const int lane = threadIdx.x;
  if (lane == 0) found_request = -1;

  int64_t before = 0;  // chunks of the requests below `base`
  for (int64_t base = 0; base < p.batch_size && v < p.max_local; base += kThreads) {
    const int64_t b = base + lane;
    const int64_t mine = b < p.batch_size ? p.request(b).num_chunks : 0;
    sums[lane] = mine;
    __syncthreads();
    for (int step = 1; step < kThreads; step *= 2) {
      const int64_t left = lane >= step ? sums[lane - step] : 0;
      __syncthreads();
      sums[lane] += left;
      __syncthreads();
    }
    const int64_t end = before + sums[lane];
    if (v >= end - mine && v < end) {
      found_request = b;
      found_index = v - (end - mine);
    }
    before += sums[kThreads - 1];
    __syncthreads();
    if (v < before) break;  // the same in all threads
  }
  __syncthreads();
  if (found_request >= 0) {
    p.write(v, found_request, found_index, lane, kThreads);
  } else if (lane == 0) {
    p.write_unused(v);
  }
}

}  // namespace

void launch(const Params& params, CUstream_st* stream) {
  launch_dependent<&build_kernel>("build_local_batches", {static_cast<int>(params.max_local + 1), kThreads, 0, 0},
                                  stream, params);
}

}  // namespace attnops::local_batches
