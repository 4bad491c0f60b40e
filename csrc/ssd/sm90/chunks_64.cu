#include "device/sm90/linear_chunk.cuh"
#include "ssd/sm90/chunks.h"

namespace attnops::ssd::sm90 {

template <>
const int Chunks<64>::kSharedBytes = attnops::sm90::kChunkSharedBytes<64, false, false>;

template <>
void Chunks<64>::launch(const LinearPrefill& params, CUstream_st* stream) {
  attnops::sm90::launch_linear_chunks<64, false, false>("ssd_prefill", params, stream);
}

}  // namespace attnops::ssd::sm90
