#pragma once
#include "device/common/pdl.cuh"
#include "fmha/sm90/attend.cuh"

namespace attnops::fmha::sm90 {

// One CTA an SM, until the plan has no more works: warpgroup 0 brings tiles, the others compute.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    fmha_sm90_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule s,
                     const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map) {
  using Layout = SharedLayout<Tr>;
  extern __shared__ char shared_memory[];
  char* base = shared_memory + (-hopper::smem_address(shared_memory) & 1023);
  const uint32_t shared = hopper::smem_address(base);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tr::kWarpgroups;
    for (int i = 0; i < Tr::kQStages; ++i) {
      hopper::mbarrier_init(shared + Layout::kQFull + 8 * i, 1);
      hopper::mbarrier_init(shared + Layout::kQEmpty + 8 * i, kWarps);
    }
    for (int i = 0; i < Tr::kStages; ++i) {
      hopper::mbarrier_init(shared + Layout::kKFull + 8 * i, 4);
      hopper::mbarrier_init(shared + Layout::kKEmpty + 8 * i, kWarps);
      hopper::mbarrier_init(shared + Layout::kVFull + 8 * i, 4);
      hopper::mbarrier_init(shared + Layout::kVEmpty + 8 * i, kWarps);
    }
    hopper::mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (threadIdx.x < 128) {
    hopper::registers_decrease<Tr::kProducerRegisters>();
    const Maps maps{&q_map, &k_map, &v_map};
    Producer<Tr>(p, s, maps, base).run();
    clear_padding<typename Tr::T>(p);
  } else {
    hopper::registers_increase<Tr::kConsumerRegisters>();
    Consumer<Tr>(p, s, base).run();
  }
}

}  // namespace attnops::fmha::sm90
