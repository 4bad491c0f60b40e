#include <cuda_fp16.h>

#include "mla_decode/sm90/fp8_fragments/launch.cuh"

namespace attnops::mla_decode::sm90::fp8_fragments {
void launch_few_dense_fp16(const Params& p, cudaStream_t stream) { launch_few<__half, Format::kDense>(p, stream); }
void launch_dense_fp16(const Params& p, cudaStream_t stream) { launch<__half, Format::kDense>(p, stream); }
}  // namespace attnops::mla_decode::sm90::fp8_fragments
