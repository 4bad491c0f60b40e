#include "fmha/cuda/any.cuh"

namespace attnops::fmha {

void launch_any_fp16(const Params& p, cudaStream_t stream) { any::launch<__half>(p, stream); }

}  // namespace attnops::fmha
