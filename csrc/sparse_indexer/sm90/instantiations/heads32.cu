#include "sparse_indexer/sm90/launch.cuh"

namespace attnops::sparse_indexer::sm90 {

void launch_heads32(const LogitsParams& params, CUstream_st* stream) { launch_heads<32>(params, stream); }

}  // namespace attnops::sparse_indexer::sm90
