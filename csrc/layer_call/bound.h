#pragma once
#include <cstdint>

#include "mla_decode/params.h"
#include "xqa_decode/params.h"

// What the calls of one layer share while the shape of the step stays: pages, page table, plan, options. A bind op
// checks it once and keeps it in the bytes of a tensor in host memory; a layer op adds what each call brings. Whoever
// binds keeps the tensors alive that were bound: here they are only addresses, as in a CUDA graph.
namespace attnops::layer_call {

inline constexpr int64_t kBoundBytes = 1024;  // of the tensor: python/attnops/ops/layer_call.py

struct XqaBound {
  static constexpr uint64_t kMagic = 0x31617178756f6221;
  uint64_t magic;
  int32_t device;             // index; below 0: the CPU
  xqa_decode::Params decode;  // without q, out, cache_seqlens, tree_mask, sinks and scales
};

struct MlaBound {
  static constexpr uint64_t kMagic = 0x31616c6d756f6221;
  uint64_t magic;
  int32_t device;
  mla_decode::Params decode;  // without q, q_pe, out, cache_seqlens, tree_mask, sinks and kv_scale
};

static_assert(sizeof(XqaBound) <= kBoundBytes && sizeof(MlaBound) <= kBoundBytes);

}  // namespace attnops::layer_call
