#pragma once
#include "device/common/launch_dependent.cuh"
#include "mla_decode/sm90/ring/kernel.cuh"
#include "mla_decode/sm90/ring/launch.h"

namespace attnops::mla_decode::sm90::ring {

template <typename T>
void launch_attention(const Params& p, const Maps& maps, cudaStream_t stream) {
  const float shares = static_cast<float>(likely_shares(p.batch_size, p.division));
  const Shape call{.requests_per_group = static_cast<float>(p.batch_size) / shares,
                   .cells = static_cast<int>(min_of(p.page_table.max_pages, int64_t{1} << 30)),
                   .most_tokens = p.page_table.num_tokens(0),
                   .by_page_size = Divisor(p.page_table.page_size)};
  const LaunchShape shape{p.num_sm_parts, kThreads, kSharedBytes, kSharedBytes};
  if (p.tree_mask) {
    launch_dependent<&mla_decode_ring_kernel<T, true>>("mla_decode_ring_kernel", shape, stream, p, maps, call);
  } else {
    launch_dependent<&mla_decode_ring_kernel<T, false>>("mla_decode_ring_kernel", shape, stream, p, maps, call);
  }
}

}  // namespace attnops::mla_decode::sm90::ring
