#pragma once
#include "device/common/pdl.cuh"
#include "fmha/sm90/attend.cuh"
#include "fmha/sm90/load_rows.cuh"
#include "fmha/sm90/merge.cuh"

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
  const bool by_rows = Tr::kFp8 || s.box_keys == 0;
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tr::kWarpgroups;
    // Warps that arrive for a tile of keys or values, and those that read a work beside warp 0 and who computes.
    const int of_keys = by_rows ? 1 : 4, of_values = Tr::kFp8 ? kTransposers : of_keys;
    const int readers = !by_rows ? 0 : s.box_keys == 0 ? 3 : kTransposers;
    for (int i = 0; i < Tr::kQStages; ++i) {
      hopper::mbarrier_init(shared + Layout::kQFull + 8 * i, 1);
      hopper::mbarrier_init(shared + Layout::kQEmpty + 8 * i, kWarps + readers);
      if (by_rows) hopper::mbarrier_init(shared + Layout::kWorkKnown + 8 * i, 1);
    }
    for (int i = 0; i < Tr::kStages; ++i) {
      hopper::mbarrier_init(shared + Layout::kKFull + 8 * i, of_keys);
      hopper::mbarrier_init(shared + Layout::kKEmpty + 8 * i, kWarps);
      hopper::mbarrier_init(shared + Layout::kVFull + 8 * i, of_values);
      hopper::mbarrier_init(shared + Layout::kVEmpty + 8 * i, kWarps);
      if constexpr (Tr::kFp8) {
        hopper::mbarrier_init(shared + Layout::kRawFull + 8 * i, 1);
        hopper::mbarrier_init(shared + Layout::kRawEmpty + 8 * i, kTransposers);
      }
    }
    hopper::mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (threadIdx.x < 128) {
    hopper::registers_decrease<Tr::kProducerRegisters>();
    const Maps maps{&q_map, &k_map, &v_map};
    if (by_rows) {
      RowProducer<Tr>(p, s, maps, base).run();
    } else if constexpr (!Tr::kFp8) {
      BoxProducer<Tr>(p, s, maps, base).run();
    }
    clear_padding<typename Tr::Out>(p);
  } else {
    hopper::registers_increase<Tr::kConsumerRegisters>();
    const int pieces = Consumer<Tr>(p, s, base).run();
    if (__any_sync(0xffffffffu, pieces > 0)) merge_pieces<Tr>(p, s, pieces, base);
  }
}

}  // namespace attnops::fmha::sm90
