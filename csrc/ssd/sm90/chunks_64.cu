#include "ssd/sm90/chunks.h"
#include "ssd/sm90/ring.cuh"

namespace attnops::ssd::sm90 {

template <>
const int Chunks<64>::kSharedBytes = attnops::sm90::kSsdSharedBytes<64>;

template <>
void Chunks<64>::launch(const LinearPrefill& params, CUstream_st* stream) {
  attnops::sm90::launch_ssd_chunks<64>(params, stream);
}

}  // namespace attnops::ssd::sm90
