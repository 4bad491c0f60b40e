#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "core/math.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "fp4_kv/cuda/launch.h"

namespace attnops::fp4_kv {
namespace {

constexpr int kThreads = 256;

// The nearest code, ties to the even one; beyond 6 saturates.
__device__ __forceinline__ uint32_t code_of(float x) {
  const float size = fabsf(x);
  const uint32_t code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                        (size >= 3.5f) + (size > 5.f);
  return code | (__float_as_uint(x) >> 31 << 3);
}

// A thread for a block of 16 values of a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) store_kv_fp4_kernel(const __grid_constant__ StoreParams p) {
  wait_for_earlier_kernels();
  const int blocks_k = p.k.head_dim / kBlock, blocks = blocks_k + p.v.head_dim / kBlock;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t per_token = static_cast<int64_t>(p.num_heads) * blocks, token = index / per_token;
  if (token >= p.slots.size) return;
  const int inside = static_cast<int>(index - token * per_token), head = inside / blocks;
  int block = inside - head * blocks;
  const int64_t slot = p.slots[token];
  if (slot >= p.num_slots && p.report && inside == 0) {
    record_fault(p.report, {kReportStoreKvFp4, ReportKind::kSlotIndex, token, token, slot, p.num_slots});
  }
  if (slot < 0 || slot >= p.num_slots) return;
  const bool is_k = block < blocks_k;
  const StoreSide& side = is_k ? p.k : p.v;  // v.head_dim is 0 where there is none
  if (!is_k) block -= blocks_k;
  const T* row =
      static_cast<const T*>(side.rows) + token * side.stride_token + head * side.stride_head + block * kBlock;
  float values[kBlock], largest = 0.f;
  bool is_nan = false;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    values[i] = static_cast<float>(row[i]);
    is_nan |= isnan(values[i]);
    largest = fmaxf(largest, fabsf(values[i]));
  }
  const float scale_of_tensor = side.pages.scale ? *side.pages.scale : 1.f;
  const float asked = __fdiv_rn(__fdiv_rn(largest, scale_of_tensor), kLargestCode);
  const uint8_t scale = is_nan ? 0x7F : __nv_cvt_float_to_fp8(asked, __NV_SATFINITE, __NV_E4M3);
  const float real = __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3))) * scale_of_tensor;
  const int64_t page = slot / p.page_size, offset = slot - page * p.page_size;
  const Pages& to = side.pages;
  uint8_t* codes = to.codes + page * to.codes_stride_page + offset * to.codes_stride_token +
                   head * to.codes_stride_head + block * (kBlock / 2);
#pragma unroll
  for (int i = 0; i < kBlock; i += 2) {
    const float low = real > 0.f ? __fdiv_rn(values[i], real) : 0.f;
    const float high = real > 0.f ? __fdiv_rn(values[i + 1], real) : 0.f;
    codes[i / 2] = static_cast<uint8_t>(code_of(low) | code_of(high) << 4);
  }
  to.scales[page * to.scales_stride_page + offset * to.scales_stride_token + head * to.scales_stride_head + block] =
      scale;
}

template <typename T>
void launch_store(const StoreParams& p, cudaStream_t stream) {
  const int64_t threads = p.slots.size * p.num_heads * ((p.k.head_dim + p.v.head_dim) / kBlock);
  const int blocks = static_cast<int>(ceil_div<int64_t>(threads, kThreads));
  if (blocks > 0) launch_dependent<&store_kv_fp4_kernel<T>>("store_kv_fp4_kernel", {blocks, kThreads, 0, 0}, stream, p);
}

}  // namespace

void launch(const StoreParams& p, cudaStream_t stream) {
  if (p.dtype == DType::kFloat32) return launch_store<float>(p, stream);
  if (p.dtype == DType::kFloat16) return launch_store<__half>(p, stream);
  launch_store<__nv_bfloat16>(p, stream);
}

}  // namespace attnops::fp4_kv
