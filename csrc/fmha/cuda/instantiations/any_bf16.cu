#include "fmha/cuda/any.cuh"

namespace attnops::fmha {

void launch_any_bf16(const Params& p, cudaStream_t stream) { any::launch<__nv_bfloat16>(p, stream); }

}  // namespace attnops::fmha
