#pragma once
#include "device/common/arch.h"
#include "device/sm80/linear_chunk_channels.cuh"
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm90/linear_chunk_ahead.cuh"
#include "device/sm90/linear_chunk_join.cuh"
#include "device/sm90/linear_chunk_multiply.cuh"
#include "device/sm90/linear_chunk_ring.cuh"

namespace attnops::sm90 {

// Bytes of shared memory of the largest kernel for keys of kKeys elements.
template <int kKeys, bool kChannels>
inline constexpr int kChunkSharedBytes =
    static_cast<int>(max_of(sizeof(RingShared<kKeys, true, kChannels, 2, Part::kWhole, !kChannels>),
                            max_of(sizeof(RingShared<kKeys, true, kChannels, 1, Part::kWhole, !kChannels>),
                                   sizeof(RingShared<kKeys, true, kChannels, 1>))));

// Chunks are made ahead of the pass where it takes at most this many of eight SMs, and where prompts have so many
// chunks.
inline constexpr int kAheadSms = 5, kAheadChunks = 6;

// Behind the kernel that makes chunks: the ends of segments, the request's own ones, and all segments at once.
template <int kKeys, bool kChannels>
void launch_chunk_parts(const char* what, const LinearPrefill& p, int most, cudaStream_t stream) {
  constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = true, .channels = kChannels};
  const ChunkCuts cuts = place_cuts(p, most, kKeys, kLayout);
  launch_chunk_cut<ChunkRing<kKeys, true, kChannels, 1, Part::kEnds>>(what, p, cuts, stream);
  launch_chunk_join<kKeys, true>(what, p, cuts, stream);
  launch_chunk_cut<ChunkRing<kKeys, true, kChannels, 1, Part::kCut>>(what, p, cuts, stream);
}

// Two warpgroups of states, 64 rows of values each, share the loads of a head. They save 4 % where works of 64 rows are
// more than SMs, and take half as long again where they are few.
template <int kKeys, bool kChannels>
void launch_linear_chunks(const char* what, const LinearPrefill& p, cudaStream_t stream) {
  const int sms = device_sms(what), most = choose_cut(p, kKeys, true, sms);
  if constexpr (kChannels) {
    launch_chunk_channels<kKeys>(what, p, stream);
    if (most > 0) return launch_chunk_parts<kKeys, kChannels>(what, p, most, stream);
  } else if (most > 0) {
    launch_chunk_local<kKeys, true, MeetGroup>(what, p, stream);
    return launch_chunk_parts<kKeys, kChannels>(what, p, most, stream);
  } else {
    const int64_t works = int64_t{p.step.batch_size} * p.step.num_heads * ceil_div(p.step.value_dim, 64);
    const int64_t chunks = chunk_places(p.num_tokens, p.step.batch_size);
    if (works > 0 && works <= sms * kAheadSms / 8 && chunks >= kAheadChunks * p.step.batch_size && ahead_counts(p)) {
      launch_chunk_ahead<kKeys>(what, p, sms - static_cast<int>(works), stream);
      return launch_chunk_ring<ChunkRing<kKeys, true, kChannels, 1>>(what, p, sms, true, stream);
    }
    launch_chunk_local<kKeys, true, MeetGroup, false>(what, p, stream);
    if (p.step.value_dim > 64 && works > sms) {
      return launch_chunk_rings<ChunkRing<kKeys, true, kChannels, 2, Part::kWhole, true>,
                                ChunkRing<kKeys, true, kChannels, 1, Part::kWhole, true>>(what, p, sms, stream);
    }
    return launch_chunk_ring<ChunkRing<kKeys, true, kChannels, 1, Part::kWhole, true>>(what, p, sms, false, stream);
  }
  if constexpr (kChannels) {
    const int64_t works = int64_t{p.step.batch_size} * p.step.num_heads * ceil_div(p.step.value_dim, 64);
    if (p.step.value_dim > 64 && works > sms) {
      return launch_chunk_rings<ChunkRing<kKeys, true, kChannels, 2>, ChunkRing<kKeys, true, kChannels, 1>>(
          what, p, sms, stream);
    }
    launch_chunk_ring<ChunkRing<kKeys, true, kChannels, 1>>(what, p, sms, false, stream);
  }
}

}  // namespace attnops::sm90
