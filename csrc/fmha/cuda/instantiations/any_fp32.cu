#include "fmha/cuda/any.cuh"

namespace attnops::fmha {

void launch_any_fp32(const Params& p, cudaStream_t stream) { any::launch<float>(p, stream); }

}  // namespace attnops::fmha
