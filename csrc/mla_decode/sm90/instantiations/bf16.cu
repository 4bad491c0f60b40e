#include <cuda_bf16.h>

#include "mla_decode/sm90/launch.cuh"

namespace attnops::mla_decode::sm90 {
void launch_bf16(const Params& p, cudaStream_t stream) { launch<__nv_bfloat16>(p, stream); }
void launch_ring_bf16(const Params& p, cudaStream_t stream) { launch_ring<__nv_bfloat16>(p, stream); }
}  // namespace attnops::mla_decode::sm90
