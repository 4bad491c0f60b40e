#pragma once
#include "device/common/pdl.cuh"
#include "fmha/sm90/attend.cuh"
#include "fmha/sm90/load_boxes.cuh"
#include "fmha/sm90/load_e4m3.cuh"
#include "fmha/sm90/load_e4m3_rows.cuh"
#include "fmha/sm90/load_narrow.cuh"
#include "fmha/sm90/load_narrow_rows.cuh"
#include "fmha/sm90/load_rows.cuh"
#include "fmha/sm90/merge.cuh"

namespace attnops::fmha::sm90 {

// Arguments of a launch lie in lines that no cache has yet, and who reads one first stands still until it is there. So
// while one thread makes the barriers, each of the other warps asks for a line or two.
// `nowhere`: a word of shared memory that nobody has written yet. Without a store the loads would be left out.
__device__ __forceinline__ void touch_arguments(const Params& p, const Schedule& s, int warp, int warps,
                                                uint32_t nowhere) {
  constexpr int kWords = 16, kOfParams = ceil_div(int{sizeof(Params)} / 4, kWords),
                kAll = kOfParams + ceil_div(int{sizeof(Schedule)} / 4, kWords);
  const auto* const params = reinterpret_cast<const int*>(&p);
  const auto* const schedule = reinterpret_cast<const int*>(&s);
#pragma unroll 1
  for (int line = warp - 1; line < kAll; line += warps - 1) {
    const int word = line < kOfParams ? params[line * kWords] : schedule[(line - kOfParams) * kWords];
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(nowhere), "r"(word) : "memory");
  }
}

// One CTA an SM, until the plan has no more works: warpgroup 0 brings tiles, the others compute. kByRows: keys and
// values come row by row, else in boxes.
template <class Tr, bool kByRows>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kShape.ctas)
    fmha_sm90_kernel(const __grid_constant__ Params p, const __grid_constant__ Schedule s,
                     const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map) {
  using Layout = SharedLayout<Tr>;
  extern __shared__ char shared_memory[];
  char* base = shared_memory + (-hopper::smem_address(shared_memory) & 1023);
  const uint32_t shared = hopper::smem_address(base);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Tr::kWarpgroups;
    // Arrivals for a tile of keys or values. Beside who computes, three warps read a work, and one wrote it.
    constexpr int kReaders = 3;
    int of_keys = 1, of_values = kTransposers, readers_of_raw = kTransposers;
    if constexpr (Tr::kNarrow && kByRows) {
      of_keys = of_values = NarrowRowProducer<Tr>::kWarps;
    } else if constexpr (Tr::kNarrow) {
      of_keys = of_values = readers_of_raw = NarrowProducer<Tr>::kWideners;
    } else if constexpr (Tr::kFp8 && kByRows) {
      of_keys = E4m3RowProducer<Tr>::kOfKeys;
      of_values = E4m3RowProducer<Tr>::kOfValues;
    } else if constexpr (kByRows) {
      of_keys = of_values = RowProducer<Tr>::arrivals(p);
    } else if constexpr (!Tr::kFp8) {
      of_values = BoxProducer<Tr>::kOfValues;
    }
    for (int i = 0; i < Tr::kQStages; ++i) {
      hopper::mbarrier_init(shared + Layout::kQFull + 8 * i, 1);
      hopper::mbarrier_init(shared + Layout::kQEmpty + 8 * i, kWarps);
    }
    for (int i = 0; i < Tr::kWorkStages; ++i) {
      hopper::mbarrier_init(shared + Layout::kWorkKnown + 8 * i, 1);
      hopper::mbarrier_init(shared + Layout::kWorkDone + 8 * i, 32 * (kWarps + kReaders));
    }
    for (int i = 0; i < Tr::kStages; ++i) {
      hopper::mbarrier_init(shared + Layout::kKFull + 8 * i, of_keys);
      hopper::mbarrier_init(shared + Layout::kKEmpty + 8 * i, kWarps * s.cluster);
      hopper::mbarrier_init(shared + Layout::kVFull + 8 * i, of_values);
      hopper::mbarrier_init(shared + Layout::kVEmpty + 8 * i, kWarps * s.cluster);
    }
    for (int i = 0; i < Tr::kRawStages; ++i) {
      hopper::mbarrier_init(shared + Layout::kRawFull + 8 * i, 1);
      hopper::mbarrier_init(shared + Layout::kRawEmpty + 8 * i, readers_of_raw);
    }
    hopper::mbarrier_init(shared + Layout::kMailFull, 1);
    hopper::mbarrier_init(shared + Layout::kMailEmpty, 1);
    if constexpr (Tr::kTakesLate && !kByRows) hopper::mbarrier_init(shared + Layout::kLastKeys, 1);
    hopper::mbarrier_init_fence();
    for (const CUtensorMap* map : {&q_map, &k_map, &v_map}) hopper::prefetch_map(map);
  } else if ((Tr::kShort || Tr::kShape.one_tile) && threadIdx.x % 32 == 0) {
    static_assert(4 * Tr::kThreads / 32 <= Tr::kWorkStages * Layout::kWorkBytes, "a word for each warp");
    const int warp = static_cast<int>(threadIdx.x) / 32;
    touch_arguments(p, s, warp, Tr::kThreads / 32, shared + Layout::kWorks + 4 * warp);
  }
  __syncthreads();
  if (s.cluster > 1) {
    hopper::cluster_arrive();
    hopper::cluster_wait();
  }
  // What can be done before the kernels ahead are done costs nothing.
  if (threadIdx.x < 128) {
    if constexpr (Tr::kTradesRegisters) hopper::registers_decrease<Tr::kProducerRegisters>();
    const FirstReads first(p, s);
    wait_for_earlier_kernels();
    if (threadIdx.x / 32 == 3) first.prefetch();
    let_next_kernel_start();
    const Maps maps{&q_map, &k_map, &v_map};
    if constexpr (Tr::kFp8 && kByRows) {
      E4m3RowProducer<Tr>(p, s, maps, base).run();
    } else if constexpr (Tr::kFp8) {
      E4m3Producer<Tr>(p, s, maps, base).run();
    } else if constexpr (Tr::kNarrow && kByRows) {
      NarrowRowProducer<Tr>(p, s, maps, base).run();
    } else if constexpr (Tr::kNarrow) {
      NarrowProducer<Tr>(p, s, maps, base).run();
    } else if constexpr (kByRows) {
      RowProducer<Tr>(p, s, maps, base).run();
    } else {
      BoxProducer<Tr>(p, s, maps, base).run();
    }
    clear_padding<typename Tr::Out>(p);
  } else {
    if constexpr (Tr::kTradesRegisters) hopper::registers_increase<Tr::kConsumerRegisters>();
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int pieces = Consumer<Tr, kByRows>(p, s, base).run();
    if (__any_sync(0xffffffffu, pieces > 0)) merge_pieces<Tr>(p, s, pieces, base);
  }
  if (s.cluster > 1) {  // the other CTA may still arrive here
    __syncwarp();
    hopper::cluster_arrive();
    hopper::cluster_wait();
  }
}

}  // namespace attnops::fmha::sm90
