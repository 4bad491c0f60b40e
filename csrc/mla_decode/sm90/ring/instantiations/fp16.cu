#include <cuda_fp16.h>

#include "mla_decode/sm90/ring/launch.cuh"

namespace attnops::mla_decode::sm90::ring {
template void launch_attention<__half>(const Params& p, const Maps& maps, cudaStream_t stream);
}  // namespace attnops::mla_decode::sm90::ring
