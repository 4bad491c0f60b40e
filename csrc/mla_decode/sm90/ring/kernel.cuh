#pragma once
#include "mla_decode/sm90/ring/scores.cuh"
#include "mla_decode/sm90/ring/values.cuh"

// MLA decode on Hopper for many rows; docs/kernels/mla_decode_sm90.md explains the schedule.
//
// A CTA takes one part of the plan, as in the kernel for all calls, but divides the work otherwise: one warpgroup
// computes the scores and probabilities of every tile, with the queries in its registers, two accumulate half of the
// output's columns each. Where the queries were in shared memory there is a third KV tile.
namespace attnops::mla_decode::sm90::ring {

template <typename T, bool kTrees>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_ring_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
                           const __grid_constant__ Shape shape) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x < kConsumerThreads) {
    attnops::sm90::registers_decrease<kValuesRegisters>();
    Values<T>(p, maps, shape, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_increase<kScoresRegisters>();
    Scores<T, kTrees>(p, shape, shared_bytes, shared).run();
  }
}

}  // namespace attnops::mla_decode::sm90::ring
