#include <cuda_bf16.h>

#include "mla_decode/sm90/fp8_fragments/launch.cuh"

namespace attnops::mla_decode::sm90::fp8_fragments {
void launch_few_rows_bf16(const Params& p, cudaStream_t stream) { launch_few<__nv_bfloat16, Format::kRow>(p, stream); }
void launch_rows_bf16(const Params& p, cudaStream_t stream) { launch<__nv_bfloat16, Format::kRow>(p, stream); }
}  // namespace attnops::mla_decode::sm90::fp8_fragments
