#pragma once
#include "xqa_decode/sm90/cluster_wgmma/launch.cuh"
#include "xqa_decode/sm90/folds/launch.h"

namespace attnops::xqa_decode::sm90 {

// Rings of units of 16 KB are larger where shares are one leaf or two.
template <typename T, int kHeadDim, bool kGathers, typename Element, int kRows, int kMoreUnits, int kMostCtas>
void launch_folding_rows(const Params& p, TeamSize size, cudaStream_t stream) {
  constexpr int kInbox = team_inbox_bytes<kHeadDim>(kRows, kMoreUnits);
  if constexpr (kHeadDim * sizeof(Element) > 128) {
    if (most_leaves(p) <= 2 * int64_t{size.shares()}) {
      return launch_team_rows<Traits<T, kHeadDim, kRows, kInbox, kMostCtas, kGathers, 1, Element>>(p, size, stream);
    }
  }
  launch_team_rows<Traits<T, kHeadDim, kRows, kInbox, kMostCtas, kGathers, kLogMostRun, Element>>(p, size, stream);
}

template <typename T, int kHeadDim, bool kGathers = false, typename Element = T>
void launch_cluster_folds(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const TeamSize size = invariant_team_size(p);
  const bool many = p.seqlen_q * (p.num_q_heads / p.num_kv_heads) > 8;
  if (many) return launch_folding_rows<T, kHeadDim, kGathers, Element, 16, 16, 2>(p, size, stream);
  if constexpr (!kGathers || sizeof(Element) > 1) {
    if (size.small) return launch_folding_rows<T, kHeadDim, kGathers, Element, 8, 0, 3>(p, size, stream);
  }
  launch_folding_rows<T, kHeadDim, kGathers, Element, 8, 16, 2>(p, size, stream);
}

}  // namespace attnops::xqa_decode::sm90
