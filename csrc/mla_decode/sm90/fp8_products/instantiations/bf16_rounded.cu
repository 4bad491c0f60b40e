#include <cuda_bf16.h>

#include "mla_decode/sm90/fp8_products/launch.cuh"

namespace attnops::mla_decode::sm90::fp8_products {
void launch_bf16_rounded(const Params& p, cudaStream_t stream) { launch<__nv_bfloat16>(p, stream); }
}  // namespace attnops::mla_decode::sm90::fp8_products
