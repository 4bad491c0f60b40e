#include "context_parallel/cuda/launch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"

namespace attnops::context_parallel {
namespace {

constexpr int kThreads = 256;

template <class Params>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Params p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.size()) p.run(i);
}

template <class Params>
void launch_rows(const char* what, const Params& params, CUstream_st* stream) {
  if (params.size() == 0) return;  // a grid of zero CTAs is a launch error
  const int blocks = static_cast<int>(ceil_div<int64_t>(params.size(), kThreads));
  launch_dependent<&rows_kernel<Params>>(what, {blocks, kThreads, 0, 0}, stream, params);
}

}  // namespace

void launch(const SeqlensParams& params, CUstream_st* stream) {
  launch_rows("context_parallel_seqlens", params, stream);
}

void launch(const SlotsParams& params, CUstream_st* stream) { launch_rows("context_parallel_slots", params, stream); }

}  // namespace attnops::context_parallel
