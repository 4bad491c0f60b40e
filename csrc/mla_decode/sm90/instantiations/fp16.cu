#include <cuda_fp16.h>

#include "mla_decode/sm90/launch.cuh"

namespace attnops::mla_decode::sm90 {
void launch_fp16(const Params& p, cudaStream_t stream) { launch<__half>(p, stream); }
void launch_ring_fp16(const Params& p, cudaStream_t stream) { launch_ring<__half>(p, stream); }
}  // namespace attnops::mla_decode::sm90
