#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/impl_table.h"
#include "core/math.h"
#include "device/common/launch_dependent.cuh"
#include "merge_state/cuda/kernel.cuh"
#include "merge_state/cuda/launch.h"

namespace attnops::merge_state {
namespace {

constexpr int kThreads = 256;

// CTAs for so many threads, without shared memory of their own; none for none, since a grid of zero is a launch error.
template <auto kKernel, typename... Arguments>
void launch_threads(const char* what, int64_t threads, cudaStream_t stream, const Arguments&... arguments) {
  const int blocks = static_cast<int>(ceil_div<int64_t>(threads, kThreads));
  if (blocks > 0) launch_dependent<kKernel>(what, {blocks, kThreads, 0, 0}, stream, arguments...);
}

template <typename T, int kVec>
void launch_pair(const Params& p, cudaStream_t stream) {
  int log_lanes = 0;
  while (log_lanes < 5 && kVec << log_lanes < p.head_dim) ++log_lanes;
  launch_threads<&merge_state_kernel<T, Vec<T, kVec>, kThreads>>(
      "merge_state_kernel", p.num_tokens * p.num_heads << log_lanes, stream, p, log_lanes);
}

template <typename T, int kVec>
void launch_many(const ManyParams& p, cudaStream_t stream) {
  launch_threads<&merge_states_kernel<T, Vec<T, kVec>, kThreads>>(
      "merge_states_kernel", p.num_tokens * p.num_heads * (p.head_dim / kVec), stream, p);
}

bool vectors_fit(const Params& p) {
  const int size = size_of(p.dtype);
  return p.head_dim * size % 16 == 0 && rows_aligned(p.out, size, 16, p.out_stride_token, p.out_stride_head) &&
         rows_aligned(p.a.out, size, 16, p.a.out_stride_token, p.a.out_stride_head) &&
         rows_aligned(p.b.out, size, 16, p.b.out_stride_token, p.b.out_stride_head);
}

bool vectors_fit(const ManyParams& p) {
  const int size = size_of(p.dtype);
  return p.head_dim * size % 16 == 0 && rows_aligned(p.out, size, 16, p.out_stride_token, p.out_stride_head) &&
         rows_aligned(p.outs, size, 16, p.outs_stride_state, p.outs_stride_token, p.outs_stride_head);
}

// Rows that start on 16-byte boundaries move in 16-byte vectors, any others element by element.
struct Impl {
  const char* name;
  DType dtype;
  bool needs_vectors;
  void (*pair)(const Params&, cudaStream_t);
  void (*many)(const ManyParams&, cudaStream_t);

  template <class AnyParams>
  std::string reject(const AnyParams& p) const {
    if (p.dtype != dtype) return std::string("takes ") + name_of(dtype) + ", got " + name_of(p.dtype);
    if (needs_vectors && !vectors_fit(p)) return "rows must start on 16-byte boundaries";
    return "";
  }
};

constexpr Impl kImpls[] = {
    {"bf16_vec", DType::kBFloat16, true, &launch_pair<__nv_bfloat16, 8>, &launch_many<__nv_bfloat16, 8>},
    {"fp16_vec", DType::kFloat16, true, &launch_pair<__half, 8>, &launch_many<__half, 8>},
    {"fp32_vec", DType::kFloat32, true, &launch_pair<float, 4>, &launch_many<float, 4>},
    {"bf16_any", DType::kBFloat16, false, &launch_pair<__nv_bfloat16, 1>, &launch_many<__nv_bfloat16, 1>},
    {"fp16_any", DType::kFloat16, false, &launch_pair<__half, 1>, &launch_many<__half, 1>},
    {"fp32_any", DType::kFloat32, false, &launch_pair<float, 1>, &launch_many<float, 1>},
};

}  // namespace

void launch(const Params& params, cudaStream_t stream) {
  select_impl("merge_state", kImpls, params).pair(params, stream);
}

void launch(const ManyParams& params, cudaStream_t stream) {
  select_impl("merge_states", kImpls, params).many(params, stream);
}

}  // namespace attnops::merge_state
