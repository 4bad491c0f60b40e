#include <cuda_bf16.h>

#include "mla_decode/sm90/few_rows/launch.cuh"

namespace attnops::mla_decode::sm90::few_rows {
void launch_selected_bf16(const Params& p, cudaStream_t stream) { launch_selected<__nv_bfloat16>(p, stream); }
}  // namespace attnops::mla_decode::sm90::few_rows
