#pragma once
#include "xqa_decode/sm90/folds/launch.h"
#include "xqa_decode/sm90/folds/run.cuh"
#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {

// Batch-invariant plans of up to 16 rows, by the kernels for balanced ones: as many levels of the tree as find room.
template <typename T, int kHeadDim, int kRows, bool kGathers, typename Element>
using FoldTraits = Traits<T, kHeadDim, kRows, 0, 2, kGathers, kRows == 8 ? 8 : 5, Element>;

template <typename T, int kHeadDim, bool kGathers = false, typename Element = T>
void launch_folds(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const bool few = p.seqlen_q * (p.num_q_heads / p.num_kv_heads) <= 8;
  if (few) return launch_traits<FoldTraits<T, kHeadDim, 8, kGathers, Element>>(p, stream);
  launch_traits<FoldTraits<T, kHeadDim, 16, kGathers, Element>>(p, stream);
}

}  // namespace attnops::xqa_decode::sm90
