#pragma once
#include "device/common/launch_dependent.cuh"
#include "mla_decode/sm90/ring/kernel.cuh"
#include "mla_decode/sm90/ring/launch.h"

namespace attnops::mla_decode::sm90::ring {

template <typename T>
void launch_attention(const Params& p, const Maps& maps, cudaStream_t stream) {
  const int even_shares =
      plan_geometry(p.batch_size, p.seqlen_q, p.num_q_heads, -1, p.num_sm_parts, p.fixed_split_tokens).even_shares;
  const LaunchShape shape{p.num_sm_parts, kThreads, kSharedBytes, kSharedBytes};
  if (p.tree_mask) {
    launch_dependent<&mla_decode_ring_kernel<T, true>>("mla_decode_ring_kernel", shape, stream, p, maps, even_shares);
  } else {
    launch_dependent<&mla_decode_ring_kernel<T, false>>("mla_decode_ring_kernel", shape, stream, p, maps, even_shares);
  }
}

}  // namespace attnops::mla_decode::sm90::ring
