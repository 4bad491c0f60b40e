#pragma once
#include <cstdint>

// CTAs run one after another, so counters are plain words.
namespace attnops {

inline unsigned load_acquire(const int32_t* semaphore) { return *semaphore; }
inline unsigned add_acq_rel(int32_t* semaphore, unsigned value) {
  const unsigned before = *semaphore;
  *semaphore += value;
  return before;
}

}  // namespace attnops
