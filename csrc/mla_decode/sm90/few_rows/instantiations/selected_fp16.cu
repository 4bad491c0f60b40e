#include <cuda_fp16.h>

#include "mla_decode/sm90/few_rows/launch.cuh"

namespace attnops::mla_decode::sm90::few_rows {
void launch_selected_fp16(const Params& p, cudaStream_t stream) { launch_selected<__half>(p, stream); }
}  // namespace attnops::mla_decode::sm90::few_rows
