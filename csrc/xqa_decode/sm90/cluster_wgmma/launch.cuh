#pragma once
#include "xqa_decode/sm90/cluster/clusters_held.h"
#include "xqa_decode/sm90/cluster_wgmma/kernel.cuh"
#include "xqa_decode/sm90/cluster_wgmma/launch.h"
#include "xqa_decode/sm90/cluster_wgmma/limits.h"
#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {

inline Team make_team(const TeamSize& size, int rows) {
  Team team{};
  team.ctas = size.ctas, team.clusters = size.clusters, team.shares = size.shares();
  team.slice = ceil_div(rows * kTeamUnitsPerRow, team.ctas);
  team.by_ctas = Divisor(team.ctas);
  team.by_clusters = Divisor(team.clusters);
  team.by_shares = Divisor(team.shares);
  team.by_slice = Divisor(team.slice);
  return team;
}

template <class Tr>
void launch_team_rows(const Params& p, TeamSize size, cudaStream_t stream) {
  constexpr const char* kWhat = "xqa_decode (clusters, wgmma)";
  constexpr int kBytes = SharedLayout<Tr>::kBytes;
  constexpr auto kKernel = &xqa_cluster_wgmma_kernel<Tr>;
  launch_dependent_prepare<kKernel>(kWhat, kBytes);
  // Other devices than an H200 may not hold the largest clusters.
  for (int log_ctas = kMaxLogCtas; log_ctas > 0; --log_ctas) {
    const bool held =
        1 << log_ctas != size.ctas || most_clusters<kKernel>(kWhat, log_ctas, Tr::kAllThreads, kBytes) > 0;
    if (!held) size.ctas /= 2;
  }
  const Shape shape = make_shape(p, Tr::kRows, 1);
  const Boxes boxes = make_boxes<Tr>(p);
  const Team team = make_team(size, shape.rows);
  const CUtensorMap keys = make_map<Tr>(p, p.k_pages, p.k_stride_token, p.k_stride_head, p.k_stride_page);
  const CUtensorMap values = make_map<Tr>(p, p.v_pages, p.v_stride_token, p.v_stride_head, p.v_stride_page);
  LaunchShape launch{p.batch_size * p.num_kv_heads * team.shares, Tr::kAllThreads, kBytes, kBytes};
  launch.cluster = team.ctas;
  launch_dependent<kKernel>(kWhat, launch, stream, p, shape, boxes, team, keys, values);
}

// Slices are whole units, so that those of all CTAs may be some units more than the rows have.
constexpr int team_inbox_bytes(int rows, int more_units) {
  return (rows * kTeamUnitsPerRow + more_units) * kUnitItems * 24;
}

template <typename T>
void launch_cluster_wgmma(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const TeamSize size = team_size(p);
  if (p.seqlen_q * (p.num_q_heads / p.num_kv_heads) > 8) {
    return launch_team_rows<Traits<T, 128, 16, team_inbox_bytes(16, 16)>>(p, size, stream);
  }
  if (size.small) return launch_team_rows<Traits<T, 128, 8, team_inbox_bytes(8, 0), 3>>(p, size, stream);
  launch_team_rows<Traits<T, 128, 8, team_inbox_bytes(8, 16)>>(p, size, stream);
}

}  // namespace attnops::xqa_decode::sm90
