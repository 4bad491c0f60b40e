#pragma once
#include "device/common/arch.h"
#include "device/sm80/linear_chunk_channels.cuh"
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm80/linear_chunk_pass.cuh"

namespace attnops {

// Bytes of shared memory of the largest kernel for keys of kKeys elements.
template <int kKeys, bool kDelta, bool kChannels>
inline constexpr int kChunkSharedBytes = static_cast<int>(sizeof(PassShared<kKeys, kDelta, kChannels, 8>));

// Warps of a CTA: many share a chunk's keys, few fill a GPU with few heads. They compute apart, so no bit depends on
// it.
inline int pass_warps(const char* what, const LinearStep& p) {
  const int64_t warps = int64_t{p.batch_size} * p.num_heads * ceil_div(p.value_dim, 16);
  const int sms = device_sms(what), useful = ceil_div(p.value_dim, 16);
  if (warps / 8 >= sms && useful > 4) return 8;
  return warps / 4 >= sms / 2 && useful > 2 ? 4 : 2;
}

template <int kKeys, bool kDelta, bool kChannels>
void launch_linear_chunks(const char* what, const LinearPrefill& p, cudaStream_t stream) {
  if constexpr (kChannels) {
    launch_chunk_channels<kKeys>(what, p, stream);
  } else {
    launch_chunk_local<kKeys, kDelta>(what, p, stream);
  }
  const int warps = pass_warps(what, p.step);
  if (warps == 8) return launch_pass_of<ChunkPass<kKeys, kDelta, kChannels, 8>>(what, p, stream);
  if (warps == 4) return launch_pass_of<ChunkPass<kKeys, kDelta, kChannels, 4>>(what, p, stream);
  launch_pass_of<ChunkPass<kKeys, kDelta, kChannels, 2>>(what, p, stream);
}

}  // namespace attnops
