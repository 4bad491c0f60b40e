#pragma once
#include "device/sm80/linear_chunk_local.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma_rows_registers.cuh"

namespace attnops::sm90 {

// Rows of a chunk times its keys.
template <int kKeys>
__device__ __forceinline__ void multiply_by_keys(float (&to)[32], uint32_t rows, uint32_t keys) {
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    const uint32_t panel = i / 4 * kPanelBytes;
    wgmma_n64<__nv_bfloat16>(to, operand_descriptor(rows + panel) + i % 4 * kStepKMajor,
                             operand_descriptor(keys + panel) + i % 4 * kStepKMajor, i > 0);
  }
}

// The products of a chunk's tokens by wgmma. All kernels of sm_90 take them, so that no bit depends on the kernel.
struct MultiplyGroup {
  template <int kKeys, bool kDelta, bool kQueries>
  __device__ static void multiply(TokenProducts& made, uint32_t keys, uint32_t queries) {
    static_assert(kDelta);  // of state spaces these products are made by their pass
    wgmma_fence();
    multiply_by_keys<kKeys>(made.key_key, keys, keys);
    if constexpr (kQueries) multiply_by_keys<kKeys>(made.query_key, queries, keys);
    wgmma_commit();
    if constexpr (!kQueries) {
      wgmma_wait<0>(made.key_key);
    } else {
      square_queries<kKeys>(made.query_query, queries);
      wgmma_wait<0>(made.key_key, made.query_key);
    }
  }
  __device__ static void rows_are_there() { fence_async_proxy(); }
};

struct MeetGroup : MultiplyGroup {
  static constexpr bool kMarks = false;
  __device__ static void meet() { __syncthreads(); }
};

}  // namespace attnops::sm90
