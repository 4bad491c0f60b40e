#include <cuda_bf16.h>

#include "mla_decode/sm90/converted/launch.cuh"

namespace attnops::mla_decode::sm90::converted {
bool launch_bf16(const Params& p, cudaStream_t stream) { return launch<__nv_bfloat16>(p, stream); }
}  // namespace attnops::mla_decode::sm90::converted
