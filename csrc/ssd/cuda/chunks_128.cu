#include "device/sm80/linear_chunk.cuh"
#include "ssd/cuda/chunks.h"

namespace attnops::ssd {

template <>
const int Chunks<128>::kSharedBytes = kChunkSharedBytes<128, false, false>;

template <>
void Chunks<128>::launch(const LinearPrefill& params, CUstream_st* stream) {
  launch_linear_chunks<128, false, false>("ssd_prefill", params, stream);
}

}  // namespace attnops::ssd
