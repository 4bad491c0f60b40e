#pragma once
#include "device/common/launch.h"
#include "mla_decode/sm90/fp8_products/kernel.cuh"
#include "mla_decode/sm90/fp8_products/launch.h"
#include "mla_decode/sm90/launch.cuh"

namespace attnops::mla_decode::sm90::fp8_products {

template <typename T>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  constexpr int kBytes = Layout::kBytes;
  const Modes modes{.use_boxes = boxes_fit(p), .out_aligned = output_aligned(p)};
  const CUtensorMap map = modes.use_boxes ? make_map(p) : CUtensorMap{};
  const auto kernel = &mla_decode_fp8_products_kernel<T>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "shared memory of mla_decode_fp8_products_kernel");
  kernel<<<p.num_sm_parts, kThreads, kBytes, stream>>>(p, map, modes);
  check_cuda(cudaGetLastError(), "mla_decode_fp8_products_kernel");
  launch_combine<T>(p, stream);
}

}  // namespace attnops::mla_decode::sm90::fp8_products
