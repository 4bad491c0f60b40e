#pragma once
#include "device/common/launch.h"
#include "mla_decode/sm90/fp8/kernel.cuh"
#include "mla_decode/sm90/fp8/launch.h"
#include "mla_decode/sm90/launch.cuh"

namespace attnops::mla_decode::sm90::fp8 {

template <typename T, Format kFormat>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const auto kernel = &mla_decode_fp8_kernel<T, kFormat>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of mla_decode_fp8_kernel");
  kernel<<<p.num_sm_parts, kThreads, kSharedBytes, stream>>>(p, output_aligned(p));
  check_cuda(cudaGetLastError(), "mla_decode_fp8_kernel");
  launch_combine<T>(p, stream);
}

}  // namespace attnops::mla_decode::sm90::fp8
