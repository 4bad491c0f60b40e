#include <cuda_bf16.h>

#include "mla_decode/sm90/fp8_fragments/launch.cuh"

namespace attnops::mla_decode::sm90::fp8_fragments {
void launch_shared_bf16(const Params& p, cudaStream_t stream) {
  launch_selected<__nv_bfloat16, Format::kShared>(p, stream);
}
}  // namespace attnops::mla_decode::sm90::fp8_fragments
