#include <cuda_fp16.h>

#include "mla_decode/sm90/ring/launch.cuh"

namespace attnops::mla_decode::sm90::ring {
template void launch_lists<__half>(const Params& p, const Maps& maps, const ListedRows& rows, cudaStream_t stream);
}  // namespace attnops::mla_decode::sm90::ring
