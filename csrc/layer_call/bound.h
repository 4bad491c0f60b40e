#pragma once
#include <cstdint>
#include <optional>
#include <type_traits>

#include "layer_call/header.h"
#include "mla_decode/params.h"
#include "paged_kv/params.h"
#include "xqa_decode/params.h"

struct CUstream_st;

// What the calls of one layer share while the shape of the step stays: pages, page table, plan, options. A bind op
// checks it once and keeps it in the bytes of a tensor in host memory; a layer op adds what each call brings, and keeps
// the call as it was checked. Here the tensors that were bound are only addresses, as in a CUDA graph; the Python
// object of the bound tensor keeps them alive.
namespace attnops::layer_call {

// A call after its checks. On a GPU the kernel is chosen, too: by shapes, strides, dtypes and alignments alone.
struct XqaCall {
  xqa_decode::Params decode;
  std::optional<paged_kv::StoreKvParams> store;
  bool brings_pages;  // xqa_pages_layer: pages and page table are the call's own
  void (*launch_decode)(const xqa_decode::Params&, CUstream_st*);
};

struct MlaCall {
  mla_decode::Params decode;
  std::optional<paged_kv::StoreMlaParams> store;
  void (*launch_decode)(const mla_decode::Params&, CUstream_st*);
};

struct XqaBound {
  static constexpr uint64_t kMagic = 0x31617178756f6221;
  static constexpr const char* kBoundBy = "xqa_layer_bind";
  BoundHeader header;
  xqa_decode::Params decode;  // without q, out, cache_seqlens, tree_mask, sinks and scales
  bool heads_first;           // of q and the pages of xqa_pages_layer: dims 1 and 2 are heads and tokens
  XqaCall last;
};

struct MlaBound {
  static constexpr uint64_t kMagic = 0x31616c6d756f6221;
  static constexpr const char* kBoundBy = "mla_layer_bind";
  BoundHeader header;
  mla_decode::Params decode;  // without q, q_pe, out, cache_seqlens, tree_mask, sinks and kv_scale
  MlaCall last;
};

static_assert(sizeof(XqaBound) <= kBoundBytes && sizeof(MlaBound) <= kBoundBytes);
static_assert(std::is_trivially_copyable_v<XqaBound> && std::is_trivially_copyable_v<MlaBound>);

}  // namespace attnops::layer_call
