#include "delta_rule/sm90/chunks.h"
#include "device/sm90/linear_chunk.cuh"

namespace attnops::delta_rule::sm90 {

template <>
const int Chunks<128, false>::kSharedBytes = attnops::sm90::kChunkSharedBytes<128, false>;

template <>
void Chunks<128, false>::launch(const LinearPrefill& params, CUstream_st* stream) {
  attnops::sm90::launch_linear_chunks<128, false>("delta_prefill", params, stream);
}

}  // namespace attnops::delta_rule::sm90
