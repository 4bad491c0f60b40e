#include "delta_rule/cuda/chunks.h"
#include "device/sm80/linear_chunk.cuh"

namespace attnops::delta_rule {

template <>
const int Chunks<64, false>::kSharedBytes = kChunkSharedBytes<64, true, false>;

template <>
void Chunks<64, false>::launch(const LinearPrefill& params, CUstream_st* stream) {
  launch_linear_chunks<64, true, false>("delta_prefill", params, stream);
}

}  // namespace attnops::delta_rule
