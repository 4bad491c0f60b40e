#pragma once
#include "device/common/launch.h"
#include "mla_decode/sm90/ring/kernel.cuh"
#include "mla_decode/sm90/ring/launch.h"

namespace attnops::mla_decode::sm90::ring {

template <typename T>
void launch_attention(const Params& p, const Maps& maps, cudaStream_t stream) {
  const auto kernel = &mla_decode_ring_kernel<T>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of mla_decode_ring_kernel");
  kernel<<<p.num_sm_parts, kThreads, kSharedBytes, stream>>>(p, maps);
  check_cuda(cudaGetLastError(), "mla_decode_ring_kernel");
}

}  // namespace attnops::mla_decode::sm90::ring
