#pragma once
#include <cstdint>

namespace attnops::layer_call {

inline constexpr int64_t kBoundBytes = 2048;  // of the tensor: python/attnops/ops/layer_call.py
inline constexpr int kCallTensors = 10;       // that xqa_layer and mla_layer take before `bound`

// What the bytes begin with, whichever op bound them.
struct BoundHeader {
  uint64_t magic;
  int32_t device;  // index; below 0: the CPU
  uint32_t taken;  // by a thread that reads or writes what follows: BoundLock
  uint64_t calls;  // that the op has checked and run so far
  // Runs call number `calls` again with other addresses, one per tensor in the schema's order, null where one is
  // absent. Shapes, strides, dtypes, devices and alignments to kAlignment bytes must be as they were then. Returns what
  // went wrong, or null; kOutdated, and nothing was run, if another call has been checked since. Null itself before the
  // first call.
  const char* (*repeat)(BoundHeader* bound, uint64_t calls, void* const* addresses);
};

inline constexpr char kOutdated[] = "outdated";

inline uint64_t calls_of(const BoundHeader& header) { return __atomic_load_n(&header.calls, __ATOMIC_ACQUIRE); }

// Another thread may keep a call, and so write `repeat`, while this one repeats the last.
inline auto repeat_of(const BoundHeader& header) { return __atomic_load_n(&header.repeat, __ATOMIC_ACQUIRE); }

// Threads may share bound bytes: what is in them is copied and replaced by one at a time.
class BoundLock {
 public:
  explicit BoundLock(BoundHeader& header) : taken_(header.taken) {
    while (__atomic_exchange_n(&taken_, 1, __ATOMIC_ACQUIRE) != 0) {
    }
  }
  ~BoundLock() { __atomic_store_n(&taken_, 0, __ATOMIC_RELEASE); }
  BoundLock(const BoundLock&) = delete;
  BoundLock& operator=(const BoundLock&) = delete;

 private:
  uint32_t& taken_;
};

inline constexpr uintptr_t kAlignment = 64;  // no kernel asks for more; what torch allocates has it

}  // namespace attnops::layer_call
