#include <cuda_bf16.h>

#include "mla_decode/sm90/ring/launch.cuh"

namespace attnops::mla_decode::sm90::ring {
template void launch_lists<__nv_bfloat16>(const Params& p, const Maps& maps, const ListedRows& rows, cudaStream_t stream);
}  // namespace attnops::mla_decode::sm90::ring
