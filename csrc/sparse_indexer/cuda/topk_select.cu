#include <cuda_bf16.h>

#include "device/common/capability.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/vec.h"
#include "sparse_indexer/cuda/launch.h"
#include "sparse_indexer/cuda/topk_select.cuh"

namespace attnops::sparse_indexer {
namespace {

// CTAs of a row: so many that its keys stay in registers, and more while multiprocessors would be idle.
int cluster_of(const SelectParams& p) {
  if (usable_sm("topk_select") < 90) return 1;
  const int64_t sms = device_sms("topk_select");
  int cluster = 1;
  const auto needed = [&] { return p.columns > int64_t{cluster} * kHeldKeys; };
  const auto idle = [&] { return p.num_rows * cluster * 2 <= sms && p.columns > int64_t{cluster} * kMinShare; };
  while (cluster < kPortableCluster && (needed() || idle())) cluster *= 2;
  return cluster;
}

// Whether each row has a CTA of its own that reads its keys twice: where rows are so many that CTAs would take turns,
// or that clusters would fill three quarters of their places.
bool streams(const SelectParams& p, int cluster) {
  if (p.columns < kLeastStreamed || p.columns > kMostStreamed) return false;
  const int64_t places = kHeldCtas * device_sms("topk_select"), ctas = p.num_rows * cluster;
  return ctas > places || (cluster > 1 && 4 * ctas > 3 * places);
}

void launch_taking_all(const SelectParams& p, cudaStream_t stream) {
  const int64_t quads = ceil_div(p.k, 4), least = ceil_div<int64_t>(quads, 32 * kMostTakeQuads);
  const int64_t at_once = device_sms("topk_select") * (2048 / 32) / p.num_rows;  // warps of a row
  const auto parts = static_cast<int>(max_of(least, min_of(at_once, ceil_div<int64_t>(quads, 32))));
  const auto blocks = static_cast<int>(ceil_div<int64_t>(p.num_rows * parts, kTakeWarps));
  launch_dependent<&topk_take_all_kernel>("topk_select", {blocks, kTakeThreads, 0, 0}, stream, p, parts);
}

template <typename T>
void launch_streaming(const SelectParams& p, cudaStream_t stream) {
  const LaunchShape shape{static_cast<int>(p.num_rows), kThreads, sizeof(StreamShared), sizeof(StreamShared), 1, 1, 1};
  launch_dependent<&topk_select_stream_kernel<T>>("topk_select", shape, stream, p);
}

template <typename T>
void launch_as(const SelectParams& p, int cluster, cudaStream_t stream) {
  const LaunchShape shape{
      static_cast<int>(p.num_rows * cluster), kThreads, sizeof(SelectShared), sizeof(SelectShared), 1, 1, cluster};
  const int64_t skipped = rows_aligned(p.logits, sizeof(T), sizeof(T) * kVec, p.stride_row) ? 0 : kVec - 1;
  if (p.columns + skipped <= int64_t{cluster} * kHeldKeys) {
    launch_dependent<&topk_select_kernel<T, true>>("topk_select", shape, stream, p);
  } else {
    launch_dependent<&topk_select_kernel<T, false>>("topk_select", shape, stream, p);
  }
}

}  // namespace

void launch(const SelectParams& p, CUstream_st* stream) {
  if (p.num_rows == 0 || p.k == 0) return;
  const bool is_float = p.dtype == DType::kFloat32;
  if (p.columns <= p.k) return launch_taking_all(p, stream);
  const int cluster = cluster_of(p);
  if (streams(p, cluster)) {
    return is_float ? launch_streaming<float>(p, stream) : launch_streaming<__nv_bfloat16>(p, stream);
  }
  is_float ? launch_as<float>(p, cluster, stream) : launch_as<__nv_bfloat16>(p, cluster, stream);
}

}  // namespace attnops::sparse_indexer
