#include "delta_rule/cuda/chunks.h"
#include "device/sm80/linear_chunk.cuh"

namespace attnops::delta_rule {

template <>
const int Chunks<64, true>::kSharedBytes = kChunkSharedBytes<64, true, true>;

template <>
void Chunks<64, true>::launch(const LinearPrefill& params, CUstream_st* stream) {
  launch_linear_chunks<64, true, true>("delta_prefill", params, stream);
}

}  // namespace attnops::delta_rule
