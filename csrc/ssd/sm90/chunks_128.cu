#include "device/sm90/linear_chunk.cuh"
#include "ssd/sm90/chunks.h"

namespace attnops::ssd::sm90 {

template <>
const int Chunks<128>::kSharedBytes = attnops::sm90::kChunkSharedBytes<128, false, false>;

template <>
void Chunks<128>::launch(const LinearPrefill& params, CUstream_st* stream) {
  attnops::sm90::launch_linear_chunks<128, false, false>("ssd_prefill", params, stream);
}

}  // namespace attnops::ssd::sm90
