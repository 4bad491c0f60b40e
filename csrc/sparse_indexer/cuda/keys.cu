#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "device/common/quantize_key.cuh"
#include "sparse_indexer/cuda/launch.h"
#include "sparse_indexer/keys.h"

namespace attnops::sparse_indexer {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

__device__ float element(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(data)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

// A warp quantizes a row; returns its scale.
template <int kDim>
__device__ float quantize_row(const Quantization& how, DType dtype, const void* data, int64_t at, uint8_t* out) {
  constexpr int kPer = kDim / 32;
  float x[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) x[i] = element(dtype, data, at + threadIdx.x % 32 * kPer + i);
  return quantize_key<kDim>(how, x, out);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) store_index_k_kernel(const __grid_constant__ StoreIndexParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  StoreIndexParams silent = p;
  if (threadIdx.x % 32 != 0) silent.report = nullptr;  // a fault counts once
  const KeyPlace place = place_of(silent, token);
  if (!place.valid) return;
  const float scale =
      quantize_row<kDim>(p.how, p.dtype, p.k, token * p.stride_token, p.pages.key(place.page, place.offset));
  if (threadIdx.x % 32 == 0) *p.pages.scale(place.page, place.offset) = scale;
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) quantize_index_q_kernel(const __grid_constant__ QuantizeQueryParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.num_tokens * p.num_heads) return;
  const int64_t token = row / p.num_heads, head = row - token * p.num_heads;
  const float scale = quantize_row<kDim>(p.how, p.dtype, p.q, token * p.stride_token + head * p.stride_head,
                                         p.q_fp8 + token * p.stride_out_token + head * p.stride_out_head);
  if (threadIdx.x % 32 == 0) {
    const float weight = element(p.weights_dtype, p.weights, token * p.stride_weights + head) * p.scale;
    p.weights_out[token * p.stride_weights_out + head] = weight * scale;
  }
}

// A warp per key, four bytes a lane.
__global__ void __launch_bounds__(kThreads) gather_index_k_kernel(const __grid_constant__ GatherIndexParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int64_t key = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (p.report != nullptr && lane == 0) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
    for (int64_t request = key; request < p.batch_size; request += step)
      report_bounds(p.report, kReportGatherIndexK, p.cu_seqlens, request, p.num_keys);
  }
  if (key >= p.num_keys) return;
  const int64_t request = request_of(p.cu_seqlens, p.batch_size, key);
  if (request < 0) return;
  GatherIndexParams silent = p;
  if (lane != 0) silent.report = nullptr;
  const KeyPlace place = place_of(silent, request, key - p.cu_seqlens[request]);
  if (lane * 4 < p.pages.dim) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(p.pages.key(place.page, place.offset));
    reinterpret_cast<uint32_t*>(p.k + key * p.stride_k)[lane] = place.valid ? from[lane] : 0;
  }
  if (lane == 0) p.k_scale[key] = place.valid ? *p.pages.scale(place.page, place.offset) : 0.f;
}

__global__ void __launch_bounds__(kThreads) expand_rows_kernel(const __grid_constant__ ExpandParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p.report != nullptr) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t request = row; request < p.batch_size; request += step) {
      report_bounds(p.report, kReportExpandRows, p.cu_seqlens_q, request, p.num_rows);
    }
  }
  if (row < p.num_rows) expand_row(p, row);
}

LaunchShape warps(int64_t rows) { return {static_cast<int>(ceil_div<int64_t>(rows, kWarps)), kThreads, 0, 0}; }

}  // namespace

void launch(const StoreIndexParams& p, CUstream_st* stream) {
  if (p.num_tokens == 0) return;
  if (p.pages.dim == 128) {
    launch_dependent<&store_index_k_kernel<128>>("store_index_k", warps(p.num_tokens), stream, p);
  } else {
    launch_dependent<&store_index_k_kernel<64>>("store_index_k", warps(p.num_tokens), stream, p);
  }
}

void launch(const QuantizeQueryParams& p, CUstream_st* stream) {
  const int64_t rows = p.num_tokens * p.num_heads;
  if (rows == 0) return;
  if (p.dim == 128) {
    launch_dependent<&quantize_index_q_kernel<128>>("quantize_index_q", warps(rows), stream, p);
  } else {
    launch_dependent<&quantize_index_q_kernel<64>>("quantize_index_q", warps(rows), stream, p);
  }
}

void launch(const GatherIndexParams& p, CUstream_st* stream) {
  const int64_t rows = max_of<int64_t>(p.num_keys, p.report != nullptr ? 1 : 0);  // bounds are judged without keys, too
  if (rows == 0) return;
  launch_dependent<&gather_index_k_kernel>("gather_index_k", warps(rows), stream, p);
}

void launch(const ExpandParams& p, CUstream_st* stream) {
  const int64_t rows = max_of<int64_t>(p.num_rows, p.report != nullptr ? 1 : 0);
  if (rows == 0) return;
  launch_dependent<&expand_rows_kernel>(
      "expand_rows", {static_cast<int>(ceil_div<int64_t>(rows, kThreads)), kThreads, 0, 0}, stream, p);
}

}  // namespace attnops::sparse_indexer
