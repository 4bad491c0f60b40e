#pragma once
#include "device/common/arch.h"
#include "device/sm80/linear_chunk_channels.cuh"
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm90/linear_chunk_pass.cuh"

namespace attnops::sm90 {

// Bytes of shared memory of the largest kernel for keys of kKeys elements.
template <int kKeys, bool kDelta, bool kChannels>
inline constexpr int kChunkSharedBytes = static_cast<int>(sizeof(PassShared<kKeys, kDelta, kChannels, 8>));

// Two warpgroups share a chunk's keys where there are heads enough for all SMs. No bit depends on it.
template <int kKeys, bool kDelta, bool kChannels>
void launch_linear_chunks(const char* what, const LinearPrefill& p, cudaStream_t stream) {
  if constexpr (kChannels) {
    launch_chunk_channels<kKeys>(what, p, stream);
  } else {
    launch_chunk_local<kKeys, kDelta>(what, p, stream);
  }
  const bool wide = p.step.value_dim > 64 && int64_t{p.step.batch_size} * p.step.num_heads >= device_sms(what);
  wide ? launch_pass_of<ChunkPass<kKeys, kDelta, kChannels, 8>>(what, p, stream)
       : launch_pass_of<ChunkPass<kKeys, kDelta, kChannels, 4>>(what, p, stream);
}

}  // namespace attnops::sm90
