#pragma once
#include "device/common/launch_dependent.cuh"
#include "mla_decode/sm90/ring/kernel.cuh"
#include "mla_decode/sm90/ring/launch.h"

namespace attnops::mla_decode::sm90::ring {

template <typename T>
void launch_attention(const Params& p, const Maps& maps, cudaStream_t stream) {
  const int even_shares = likely_shares(p.batch_size, p.division);
  const LaunchShape shape{p.num_sm_parts, kThreads, kSharedBytes, kSharedBytes};
  if (p.tree_mask) {
    launch_dependent<&mla_decode_ring_kernel<T, true>>("mla_decode_ring_kernel", shape, stream, p, maps, even_shares);
  } else {
    launch_dependent<&mla_decode_ring_kernel<T, false>>("mla_decode_ring_kernel", shape, stream, p, maps, even_shares);
  }
}

template <typename T>
void launch_lists(const Params& p, const Maps& maps, const ListedRows& rows, cudaStream_t stream) {
  const LaunchShape shape{p.num_sm_parts, kThreads, kListedSharedBytes, kListedSharedBytes};
  launch_dependent<&mla_list_ring_kernel<T>>("mla_list_ring_kernel", shape, stream, p, maps, rows);
}

}  // namespace attnops::mla_decode::sm90::ring
