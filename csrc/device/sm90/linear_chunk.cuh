#pragma once
#include "device/common/arch.h"
#include "device/sm80/linear_chunk_channels.cuh"
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm90/linear_chunk_pass.cuh"
#include "device/sm90/linear_chunk_ring.cuh"

namespace attnops::sm90 {

// Bytes of shared memory of the largest kernel for keys of kKeys elements.
template <int kKeys, bool kDelta, bool kChannels>
inline constexpr int kChunkSharedBytes = static_cast<int>(
    max_of(sizeof(PassShared<kKeys, kDelta, kChannels, 8>), sizeof(RingShared<kKeys, kDelta, kChannels, 1>)));

// Where every CTA of 64 rows has an SM of its own, loads, states and outputs have a warpgroup each, which takes half
// of the time for a chunk. Where heads are many, several CTAs of one or two warpgroups share an SM.
template <int kKeys, bool kDelta, bool kChannels>
void launch_linear_chunks(const char* what, const LinearPrefill& p, cudaStream_t stream) {
  if constexpr (kChannels) {
    launch_chunk_channels<kKeys>(what, p, stream);
  } else {
    launch_chunk_local<kKeys, kDelta>(what, p, stream);
  }
  const int64_t heads = int64_t{p.step.batch_size} * p.step.num_heads;
  const int sms = device_sms(what);
  if (heads * ceil_div(p.step.value_dim, 64) <= sms) {
    return launch_pass_of<ChunkRing<kKeys, kDelta, kChannels, 1>>(what, p, stream);
  }
  p.step.value_dim > 64 && heads >= sms ? launch_pass_of<ChunkPass<kKeys, kDelta, kChannels, 8>>(what, p, stream)
                                        : launch_pass_of<ChunkPass<kKeys, kDelta, kChannels, 4>>(what, p, stream);
}

}  // namespace attnops::sm90
