#pragma once
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma_rows_registers.cuh"

namespace attnops::sm90 {

// The products of a chunk's tokens by wgmma. All kernels of sm_90 take them, so that no bit depends on the kernel.
struct MultiplyGroup {
  template <int kKeys, bool kDelta>
  __device__ static void multiply(TokenProducts& made, uint32_t keys, uint32_t queries) {
    using Bf16 = __nv_bfloat16;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const uint32_t panel = i / 4 * kPanelBytes;
      const uint64_t columns = operand_descriptor(keys + panel) + i % 4 * kStepKMajor;
      if constexpr (kDelta) wgmma_n64<Bf16>(made.key_key, columns, columns, i > 0);
      wgmma_n64<Bf16>(made.query_key, operand_descriptor(queries + panel) + i % 4 * kStepKMajor, columns, i > 0);
    }
    wgmma_commit();
    if constexpr (kDelta) {
      square_queries<kKeys>(made, queries);
      wgmma_wait<0>(made.key_key, made.query_key);
    } else {
      wgmma_wait<0>(made.query_key);
    }
  }
  __device__ static void rows_are_there() { fence_async_proxy(); }
};

struct MeetGroup : MultiplyGroup {
  static constexpr bool kMarks = false;
  __device__ static void meet() { __syncthreads(); }
};

}  // namespace attnops::sm90
