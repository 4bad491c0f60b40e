#pragma once
#include "device/common/launch_dependent.cuh"
#include "mla_decode/sm90/ring/kernel.cuh"
#include "mla_decode/sm90/ring/launch.h"

namespace attnops::mla_decode::sm90::ring {

template <typename T>
void launch_attention(const Params& p, const Maps& maps, cudaStream_t stream) {
  launch_dependent<&mla_decode_ring_kernel<T>>("mla_decode_ring_kernel",
                                               {p.num_sm_parts, kThreads, kSharedBytes, kSharedBytes}, stream, p, maps);
}

}  // namespace attnops::mla_decode::sm90::ring
