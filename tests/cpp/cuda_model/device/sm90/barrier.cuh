#pragma once
#include "device/sm80/mma.cuh"

// Barriers in shared memory, by their definitions in the PTX ISA. What a barrier keeps is the model's own.
namespace attnops::sm90 {

using attnops::smem_address;

struct MbarrierModel {
  uint16_t pending, count;
  uint32_t phase : 8, bytes : 24;
};

inline MbarrierModel& mbarrier_of(uint32_t address) {
  static_assert(sizeof(MbarrierModel) == 8);
  if (address % 8 != 0 || address + 8 > sizeof(memory)) std::abort();
  return *reinterpret_cast<MbarrierModel*>(memory + address);
}
inline void mbarrier_turn(MbarrierModel& b) {
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.phase = b.phase + 1;
}
inline void mbarrier_init(uint32_t barrier, int arrivals) {
  mbarrier_of(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  MbarrierModel& b = mbarrier_of(barrier);
  if (b.pending == 0) std::abort();
  --b.pending;
  mbarrier_turn(b);
}
inline void mbarrier_arrive_if(uint32_t barrier, bool condition) {
  if (condition) mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_remote_if(uint32_t barrier, bool condition) { mbarrier_arrive_if(barrier, condition); }
inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  MbarrierModel& b = mbarrier_of(barrier);
  b.bytes = b.bytes + bytes;
  mbarrier_arrive(barrier);
}
inline void mbarrier_complete(uint32_t barrier, int bytes) {
  MbarrierModel& b = mbarrier_of(barrier);
  if (b.bytes < static_cast<uint32_t>(bytes)) std::abort();
  b.bytes = b.bytes - bytes;
  mbarrier_turn(b);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while ((mbarrier_of(barrier).phase & 1) == parity) cuda_model::yield();
}

inline void named_barrier_arrive(int id, int threads) {
  auto& b = cuda_model::cta->named[id];
  if (++b.arrived == threads) b.arrived = 0, ++b.generation;
}
inline void named_barrier_sync(int id, int threads) {
  auto& b = cuda_model::cta->named[id];
  const uint64_t own = b.generation;
  named_barrier_arrive(id, threads);
  while (b.generation == own) cuda_model::yield();
}

inline void named_barrier_meet(int id, int threads, bool waits) {
  waits ? named_barrier_sync(id, threads) : named_barrier_arrive(id, threads);
}

template <int kRegisters>
void registers_increase() {}
template <int kRegisters>
void registers_decrease() {}

inline void fence_async_proxy() {}

}  // namespace attnops::sm90
