#pragma once
#include "device/sm80/linear_chunk_pass.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma_rows_registers.cuh"

// The pass of device/sm80/linear_chunk_pass.cuh with warpgroup products: a warpgroup has 64 rows of values, their
// state in accumulators, and what is multiplied with it in shared memory, read once for all 64.
namespace attnops::sm90 {

template <int kKeys, bool kDelta, bool kChannels, int kWarps>
class ChunkPass : public ChunkPassBase<ChunkPass<kKeys, kDelta, kChannels, kWarps>, kKeys, kDelta, kChannels, kWarps> {
 public:
  using Base = ChunkPassBase<ChunkPass, kKeys, kDelta, kChannels, kWarps>;
  using Base::Base;
  using typename Base::Stage;
  using Bf16 = __nv_bfloat16;

  __device__ void take(Stage& stage, int64_t c) {
    fence_async_proxy();
    __syncthreads();
    float u[32], o[32];
    uint32_t state[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) Base::pack(state[i], this->state_ + 8 * i, this->state_ + 8 * i + 4);
    wgmma_fence();
    if constexpr (kDelta) {
      multiply_state(u, state, stage.k);
      wgmma_commit();
    }
    multiply_state(o, state, stage.q);
    wgmma_commit();
    if constexpr (kDelta) wgmma_wait<1>(u);
    this->take_values(stage, u);
    uint32_t a[4][4], decayed[4][4];
    Base::pack_tokens(a, u);
    if constexpr (kDelta) {
      wgmma_fence();
      multiply_tokens(u, a, stage.t, false);
      wgmma_commit();
      wgmma_wait<0>(u, o);
      Base::pack_tokens(a, u);
    } else {
      wgmma_wait<0>(o);
    }
    this->pack_decayed(stage, decayed, u);
    this->decay_state(stage);
    this->decay_out(stage, o);
    wgmma_fence();
    const uint32_t keys = attnops::smem_address(kChannels ? stage.k_end : stage.k);
#pragma unroll
    for (int panel = 0; panel < kKeys / 64; ++panel) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wgmma_rows<Bf16, 1>(part(panel), decayed[j], operand_descriptor(keys + panel * kPanelBytes) + j * kStepMnMajor,
                            1);
      }
    }
    multiply_tokens(o, a, stage.p, true);
    wgmma_commit();
    wgmma_wait<0>(o, this->state_);
    this->add_skip(stage, o);
    this->store_out(stage, o, c);
  }

 private:
  __device__ float (&part(int panel))[32] { return reinterpret_cast<float(&)[32]>(this->state_[32 * panel]); }

  // c = state m^T, m of 64 rows.
  __device__ static void multiply_state(float (&c)[32], const uint32_t (&state)[kKeys / 16][4],
                                        const unsigned char* m) {
    const uint32_t panels = attnops::smem_address(m);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      wgmma_n64<Bf16>(c, state[i], operand_descriptor(panels + i / 4 * kPanelBytes) + i % 4 * kStepKMajor, i > 0);
    }
  }

  // c (+)= a m^T, m [64, 64].
  __device__ static void multiply_tokens(float (&c)[32], const uint32_t (&a)[4][4], const unsigned char* m, bool adds) {
    const uint32_t panel = attnops::smem_address(m);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      wgmma_n64<Bf16>(c, a[j], operand_descriptor(panel) + j * kStepKMajor, adds || j > 0);
    }
  }
};

}  // namespace attnops::sm90
