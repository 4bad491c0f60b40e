#include "delta_rule/cuda/chunks.h"
#include "device/sm80/linear_chunk.cuh"

namespace attnops::delta_rule {

template <>
const int Chunks<128, true>::kSharedBytes = kChunkSharedBytes<128, true, true>;

template <>
void Chunks<128, true>::launch(const LinearPrefill& params, CUstream_st* stream) {
  launch_linear_chunks<128, true, true>("delta_prefill", params, stream);
}

}  // namespace attnops::delta_rule
