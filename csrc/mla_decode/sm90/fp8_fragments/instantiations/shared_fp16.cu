#include <cuda_fp16.h>

#include "mla_decode/sm90/fp8_fragments/launch.cuh"

namespace attnops::mla_decode::sm90::fp8_fragments {
void launch_shared_fp16(const Params& p, cudaStream_t stream) { launch_selected<__half, Format::kShared>(p, stream); }
}  // namespace attnops::mla_decode::sm90::fp8_fragments
