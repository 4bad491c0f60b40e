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
  const int ctas = p.batch_size * p.num_kv_heads << (cluster.log_ctas + cluster.log_clusters);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {1u << cluster.log_ctas, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(Tr::kThreads);
  config.dynamicSmemBytes = Inbox<Tr>::kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check_cuda(cudaLaunchKernelEx(&config, &xqa_cluster_kernel<Tr>, p, shape, cluster), kWhat);
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
