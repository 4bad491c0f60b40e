#include "fmha/cuda/any.cuh"

namespace attnops::fmha {

void launch_any_bf16(const Params& p, CUstream_st* stream) { any::launch<__nv_bfloat16>(p, stream); }
void launch_any_fp16(const Params& p, CUstream_st* stream) { any::launch<__half>(p, stream); }
void launch_any_fp32(const Params& p, CUstream_st* stream) { any::launch<float>(p, stream); }

}  // namespace attnops::fmha
