#pragma once

namespace attnops {

inline void arrive_named(int id, int threads) {
  auto& b = cuda_model::cta->named[id];
  if (++b.arrived == threads) b.arrived = 0, ++b.generation;
}
inline void sync_named(int id, int threads) {
  const auto& b = cuda_model::cta->named[id];
  const uint64_t own = b.generation;
  arrive_named(id, threads);
  while (b.generation == own) cuda_model::yield();
}

}  // namespace attnops
