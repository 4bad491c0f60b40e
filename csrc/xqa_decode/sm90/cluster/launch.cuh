#pragma once
#include "xqa_decode/cuda/launch.cuh"
#include "xqa_decode/sm90/cluster/clusters_held.h"
#include "xqa_decode/sm90/cluster/kernel.cuh"
#include "xqa_decode/sm90/cluster/launch.h"
#include "xqa_decode/sm90/cluster/limits.h"

namespace attnops::xqa_decode::sm90 {

template <class Tr>
ClusterShape cluster_shape(const char* what, const Params& p, const Shape& shape) {
  const int works = p.batch_size * p.num_kv_heads;
  ClusterShape cluster{};
  cluster.log_ctas = log_most_ctas(works);
  while (cluster.log_ctas > 0 &&
         most_clusters<&xqa_cluster_kernel<Tr>>(what, cluster.log_ctas, Tr::kThreads, Inbox<Tr>::kBytes) < works) {
    --cluster.log_ctas;
  }
  cluster.log_clusters = log_clusters_per_work(p, works, cluster.log_ctas);
  const int items = shape.rows * Tr::kHeadDim / 4;
  cluster.log_slice = 3;
  while ((1 << (cluster.log_slice + cluster.log_ctas)) < items) ++cluster.log_slice;
  return cluster;
}

template <class Tr>
void launch_cluster_rows(const Params& p, cudaStream_t stream) {
  constexpr const char* kWhat = "xqa_decode (clusters)";
  launch_dependent_prepare<&xqa_cluster_kernel<Tr>>(kWhat, Inbox<Tr>::kBytes);
  const Shape shape = make_shape(p, Tr::kRows, Tr::kWarps);
  const ClusterShape cluster = cluster_shape<Tr>(kWhat, p, shape);
  LaunchShape launch{p.batch_size * p.num_kv_heads << (cluster.log_ctas + cluster.log_clusters), Tr::kThreads,
                     Inbox<Tr>::kBytes, Inbox<Tr>::kBytes};
  launch.cluster = 1 << cluster.log_ctas;
  launch_dependent<&xqa_cluster_kernel<Tr>>(kWhat, launch, stream, p, shape, cluster);
}

template <typename T, bool kFp8, int kHeadDim>
void launch_cluster(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  if (p.seqlen_q * (p.num_q_heads / p.num_kv_heads) <= 8) {
    return launch_cluster_rows<Traits<T, kFp8, kHeadDim, 1>>(p, stream);
  }
  launch_cluster_rows<Traits<T, kFp8, kHeadDim, 2>>(p, stream);
}

}  // namespace attnops::xqa_decode::sm90
