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

// Whether the parts of two neighbouring heads walk the same tiles, and compute all of them.
inline bool heads_pair_up(const Params& p) {
  return heads_side_by_side(p.num_sm_parts, p.num_kv_heads) && p.num_kv_heads % 2 == 0 && p.fixed_split_tokens == 0;
}

// Batch-invariant plans, by the kernels for 16-bit pages: as many levels of the tree as find room.
template <int kRows, int kMostCtas, int kLevels>
using FoldTraits = sm90::Traits<__half, 128, kRows, 0, kMostCtas, false, kLevels, uint8_t>;

template <bool kGathers>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const bool few = p.seqlen_q * (p.num_q_heads / p.num_kv_heads) <= 8;
  if constexpr (!kGathers) {
    if (p.fixed_split_tokens != 0) {
      if (few) return sm90::launch_traits<FoldTraits<8, 3, 8>>(p, stream);
      return sm90::launch_traits<FoldTraits<16, 3, 5>>(p, stream);
    }
  }
  // Several short pieces a part, by the room in the page table: the next ones should be there when they begin.
  constexpr int kShort = 2048;
  const bool many = p.batch_size * p.num_kv_heads > 2 * p.num_sm_parts && most_visible_tokens(p) <= kShort;
  // Rows of two heads are nearly whole lines.
  const bool thin = p.head_dim <= 96 && p.k_stride_head < p.k_stride_token;
  if constexpr (!kGathers) {
    if (few && (many || thin) && heads_pair_up(p)) return launch_traits<Traits<8, kGathers, 12, 2>>(p, stream);
  }
  if (few && may_deal(p)) return launch_traits<Traits<8, kGathers, 12, 1, true>>(p, stream);
  // A ring that is deeper than tiles need is room for one more warp where all works of a part are short.
  if (few) return launch_traits<Traits<8, kGathers, 12>>(p, stream);
  launch_traits<Traits<16, kGathers>>(p, stream);
}

}  // namespace attnops::xqa_decode::sm90::fp8
