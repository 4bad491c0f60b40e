#pragma once
#include "xqa_decode/sm90/fp8/kernel.cuh"
#include "xqa_decode/sm90/fp8/launch.h"
#include "xqa_decode/sm90/launch.cuh"
#include "xqa_decode/sm90/limits.h"

namespace attnops::xqa_decode::sm90::fp8 {

template <class Tr>
void launch_traits(const Params& p, cudaStream_t stream) {
  const Shape shape = make_shape(p, Tr::kRows, 1);
  const CUtensorMap keys = make_map<Tr>(p, p.k_pages, p.k_stride_token, p.k_stride_head, p.k_stride_page);
  const CUtensorMap values = make_map<Tr>(p, p.v_pages, p.v_stride_token, p.v_stride_head, p.v_stride_page);
  constexpr int kBytes = SharedLayout<Tr>::kBytes;
  const LaunchShape grid{p.num_sm_parts / Tr::kHeads, Tr::kAllThreads, kBytes, kBytes};
  launch_dependent<&xqa_decode_sm90_fp8_kernel<Tr>>("xqa_decode", grid, stream, p, shape, make_boxes<Tr>(p), keys,
                                                    values);
}

// Calls that `reject_fp8` and `reject_fp8_gather` of limits.h have nothing against.
template <bool kGathers>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  if constexpr (kGathers) {
    launch_traits<Traits<16, kGathers>>(p, stream);
  } else {
    launch_traits<Traits<8, kGathers, 12, 2>>(p, stream);
  }
}

}  // namespace attnops::xqa_decode::sm90::fp8
