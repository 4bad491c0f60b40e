#pragma once
#include "fmha/sm90/launch.cuh"
#include "fmha/sm90/load_e4m3_rows.cuh"

namespace attnops::fmha::sm90 {

// The kernel of kernel.cuh over these rows.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    fmha_sm90_e4m3_rows_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule s,
                               const __grid_constant__ CUtensorMap q_map) {
  using Layout = SharedLayout<Tr>;
  using Producer = E4m3RowProducer<Tr>;
  extern __shared__ char shared_memory[];
  char* base = shared_memory + (-hopper::smem_address(shared_memory) & 1023);
  const uint32_t shared = hopper::smem_address(base);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tr::kWarpgroups, kReaders = 3;
    const auto init = [shared](int first, int count, int arrivals) {
      for (int i = 0; i < count; ++i) hopper::mbarrier_init(shared + first + 8 * i, arrivals);
    };
    init(Layout::kQFull, Tr::kQStages, 1);
    init(Layout::kQEmpty, Tr::kQStages, kWarps);
    init(Layout::kWorkKnown, Tr::kWorkStages, 1);
    init(Layout::kWorkDone, Tr::kWorkStages, 32 * (kWarps + kReaders));
    init(Layout::kKFull, Tr::kStages, Producer::kOfKeys);
    init(Layout::kKEmpty, Tr::kStages, kWarps);
    init(Layout::kVFull, Tr::kStages, Producer::kOfValues);
    init(Layout::kVEmpty, Tr::kStages, kWarps);
    hopper::mbarrier_init_fence();
    hopper::prefetch_map(&q_map);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::registers_decrease<Tr::kProducerRegisters>();
    const FirstReads first(p, s);
    wait_for_earlier_kernels();
    if (threadIdx.x / 32 == 3) first.prefetch();
    let_next_kernel_start();
    const Maps maps{&q_map, &q_map, &q_map};
    Producer(p, s, maps, base).run();
    clear_padding<typename Tr::Out>(p);
  } else {
    hopper::registers_increase<Tr::kConsumerRegisters>();
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int pieces = Consumer<Tr, true>(p, s, base).run();
    if (__any_sync(0xffffffffu, pieces > 0)) merge_pieces<Tr>(p, s, pieces, base);
  }
}

template <class Tr>
void launch_e4m3(const Params& p, cudaStream_t stream) {
  if (p.num_q_tokens == 0) return;
  const Schedule s = make_schedule<Tr>(p);
  if (s.box_keys > 0) return launch_kernel<Tr, false>(p, s, stream);
  constexpr int kBytes = SharedLayout<Tr>::kAllBytes;
  const int ctas = max_of(min_of(s.takes, device_sms("fmha")), 1);
  launch_dependent<&fmha_sm90_e4m3_rows_kernel<Tr>>("fmha", {ctas, Tr::kThreads, kBytes, kBytes}, stream, p, s,
                                                    query_map(p, s));
}

}  // namespace attnops::fmha::sm90
