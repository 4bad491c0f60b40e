#pragma once
#include "core/linear_prefill.h"
#include "core/math.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"

// The order of a prompt's requests: a request's place is the number of those before it.
namespace attnops {

inline constexpr int kOrderThreads = 128;

static __global__ void __launch_bounds__(kOrderThreads) order_requests_kernel(const __grid_constant__ RequestOrder p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int request = static_cast<int>(blockIdx.x) * kOrderThreads + threadIdx.x;
  if (request >= p.batch_size) return;
  const int64_t own = p.tokens(request);
  int before = 0;
  for (int other = 0; other < p.batch_size; ++other) {
    const int64_t tokens = p.tokens(other);
    before += tokens > own || (tokens == own && other < request);
  }
  p.plan[before] = request;
}

inline void launch_request_order(const char* what, const RequestOrder& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;  // a grid of zero CTAs is a launch error
  const LaunchShape shape{.blocks = ceil_div(p.batch_size, kOrderThreads),
                          .threads = kOrderThreads,
                          .shared_bytes = 0,
                          .max_shared_bytes = 0};
  launch_dependent<&order_requests_kernel>(what, shape, stream, p);
}

}  // namespace attnops
