#pragma once
#include <cstdint>

namespace attnops::layer_call {

inline constexpr int64_t kBoundBytes = 2048;  // of the tensor: python/attnops/ops/layer_call.py
inline constexpr int kCallTensors = 10;       // that xqa_layer and mla_layer take before `bound`

// What the bytes begin with, whichever op bound them.
struct BoundHeader {
  uint64_t magic;
  int32_t device;  // index; below 0: the CPU
  uint64_t calls;  // that the op has checked and run so far
  // Runs the last of them again with other addresses, one per tensor in the schema's order, null where one is absent.
  // Shapes, strides, dtypes, devices and alignments to kAlignment bytes must be as they were then. Returns what went
  // wrong, or null. Null itself before the first call. A caller that repeats may give it a place for what makes the
  // next time quicker, null at first, for one thread at a time; `forget` frees that.
  const char* (*repeat)(const BoundHeader* bound, void* const* addresses, void** kept);
  void (*forget)(void* kept);
};

inline constexpr uintptr_t kAlignment = 64;  // no kernel asks for more; what torch allocates has it

}  // namespace attnops::layer_call
