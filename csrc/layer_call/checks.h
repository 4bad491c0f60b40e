#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>

#include "layer_call/bound.h"
#include "mla_decode/checks.h"
#include "paged_kv/checks.h"
#include "torch_bindings/check.h"
#include "torch_bindings/tree_checks.h"
#include "xqa_decode/checks.h"

// Checks of what a layer's call brings, against what was bound. A call on a GPU has microseconds for all of it, so each
// property is read once and no message is built unless it is wrong.
namespace attnops::layer_call {

inline void check_bound_tensor(const char* op, const Tensor& bound) {
  Dim bytes("bytes", kBoundBytes, "every bound call");
  TensorCheck check(op, "bound", bound);
  check.dtype({DType::kUInt8}).shape({bytes}).contiguous().aligned(alignof(std::max_align_t));
  if (!bound.is_cpu()) fail(op, "bound must be in host memory");
}

template <class Bound, class Params>
Bound& write_bound(const char* op, const Tensor& tensor, int32_t device, const Params& decode) {
  check_bound_tensor(op, tensor);
  Bound bound{};
  bound.header = {.magic = Bound::kMagic, .device = device, .taken = 0, .calls = 0, .repeat = nullptr};
  bound.decode = decode;
  std::memcpy(tensor.mutable_data_ptr(), &bound, sizeof(Bound));
  return *static_cast<Bound*>(tensor.mutable_data_ptr());
}

inline int32_t device_of(const Tensor& tensor) { return tensor.is_cpu() ? -1 : tensor.get_device_index(); }

template <class Bound>
Bound& checked_bound(const char* op, const Tensor& tensor, const Tensor& q) {
  check_bound_tensor(op, tensor);
  Bound& bound = *static_cast<Bound*>(tensor.mutable_data_ptr());
  if (bound.header.magic != Bound::kMagic) fail(op, std::string("bound must have been written by ") + Bound::kBoundBy);
  if (bound.header.device != device_of(q)) {
    const auto name = [](int32_t device) { return device < 0 ? "cpu" : "cuda:" + std::to_string(device); };
    fail(op, "q must be on " + name(bound.header.device) + " as the bound pages, got " + name(device_of(q)));
  }
  return bound;
}

// For structured bindings.
inline std::array<void*, kCallTensors> addresses_of(void* const* addresses) {
  std::array<void*, kCallTensors> all;
  std::copy_n(addresses, kCallTensors, all.begin());
  return all;
}

// Rows of tokens: [T, heads * dim], or [T, heads, dim] with heads anywhere.
struct Rows {
  void* data;
  int64_t tokens, stride_token, stride_head;
};

[[noreturn]] inline void fail_rows(const char* op, const char* name, const Tensor& rows, int64_t heads, int64_t dim) {
  const std::string h = std::to_string(heads), d = std::to_string(dim);
  fail(op, std::string(name) + " must have shape [num_tokens, " + std::to_string(heads * dim) + "] or [num_tokens, " +
               h + ", " + d + "], got " + shape_text(rows));
}

inline Rows checked_rows(const char* op, const char* name, const Tensor& rows, int64_t heads, int64_t dim) {
  const auto sizes = rows.sizes(), strides = rows.strides();
  const bool flat = sizes.size() == 2 && sizes[1] == heads * dim;
  if (!flat && !(sizes.size() == 3 && sizes[1] == heads && sizes[2] == dim)) fail_rows(op, name, rows, heads, dim);
  const size_t last = sizes.size() - 1;
  if (strides[last] != 1 && sizes[last] > 1) TensorCheck(op, name, rows).dense_last();
  void* data = rows.mutable_data_ptr();
  if (data == nullptr) TensorCheck(op, name, rows).has_memory();
  return {data, sizes[0], strides[0], flat ? dim : strides[1]};
}

// The rows of q and out: as many as the plan has queries.
inline Rows checked_queries(const char* op, const char* name, const Tensor& rows, const Tensor& q, DType dtype,
                            int64_t batch_size, int64_t seqlen_q, int64_t heads, int64_t dim) {
  TensorCheck(op, name, rows).device_as("q", q).dtype({dtype});
  const Rows checked = checked_rows(op, name, rows, heads, dim);
  if (checked.tokens != batch_size * seqlen_q) {
    fail(op, std::string(name) + ".shape[0] (num_tokens) must be " + std::to_string(batch_size * seqlen_q) +
                 " (batch_size * seqlen_q of the bound plan), got " + std::to_string(checked.tokens));
  }
  return checked;
}

inline const int32_t* checked_seqlens(const char* op, const Tensor& seqlens, const Tensor& q, int64_t batch_size) {
  Dim size("batch_size", batch_size, "the bound plan");
  TensorCheck(op, "cache_seqlens", seqlens).device_as("q", q).dtype({DType::kInt32}).shape({size}).contiguous();
  return static_cast<const int32_t*>(seqlens.const_data_ptr());
}

// The options that every decode op has; `Params` is of either.
template <class Params>
void take_options(const char* op, Params& p, const OptionalTensor& tree_mask, const OptionalTensor& sinks,
                  const Tensor& q) {
  if (tree_mask) {
    Dim batch("batch_size", p.batch_size, "the bound plan"), tokens("seqlen_q", p.seqlen_q, "the bound plan");
    Dim bytes("mask_bytes");
    if (!p.causal) fail(op, "causal must be True with tree_mask, which says what causal means among the new tokens");
    const TensorCheck mask(op, "tree_mask", *tree_mask);
    mask.device_as("q", q).dtype({DType::kUInt8}).shape({batch, tokens, bytes}).dense_last();
    check_mask_bytes(mask, *bytes, p.tree_keys, p.seqlen_q);
    p.tree_mask_stride_request = tree_mask->stride(0), p.tree_mask_stride_token = tree_mask->stride(1);
  }
  if (sinks) {
    Dim heads("num_q_heads", p.num_q_heads, "the bound plan");
    TensorCheck(op, "sinks", *sinks).device_as("q", q).dtype({DType::kFloat32}).shape({heads}).contiguous();
  }
  p.tree_mask = data_or_null<const uint8_t>(tree_mask);
  p.sinks = data_or_null<const float>(sinks);
}

struct Scale {
  const float* data;
  int stride;
};

inline Scale checked_scale(const char* op, const char* name, const OptionalTensor& scale, const Tensor& q, bool fp8,
                           int64_t num_heads) {
  if (!scale) return {nullptr, 0};
  if (!fp8) fail(op, std::string(name) + " must be absent: the bound pages are not FP8");
  TensorCheck(op, name, *scale).device_as("q", q).dtype({DType::kFloat32}).rank(1).contiguous();
  const int64_t size = scale->size(0);
  if (size != 1 && size != num_heads) {
    fail(op, std::string(name) + ".shape[0] must be 1 or " + std::to_string(num_heads) + " (num_kv_heads), got " +
                 std::to_string(size));
  }
  return {data_or_null<const float>(scale), size > 1 ? 1 : 0};
}

// New rows may have the pages' dtype, or a wider one that the store quantizes.
inline DType checked_new_rows(const char* op, const char* name, const Tensor& rows, const Tensor& q, DType pages,
                              bool has_scale) {
  const TensorCheck check(op, name, rows);
  check.device_as("q", q).dtype(
      {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2});
  const DType dtype = dtype_of(rows);
  const bool quantizes = pages != dtype && size_of(pages) == 1 && size_of(dtype) > 1;
  if (dtype != pages && !quantizes) {
    fail(op, std::string(name) + " must have dtype " + name_of(pages) + " as the bound pages, got " + name_of(dtype));
  }
  if (dtype == pages && has_scale) {
    fail(op, std::string("the scale of ") + name + " must be absent where it has the pages' own dtype");
  }
  return dtype;
}

inline paged_kv::StoreTarget checked_target(const char* op, const OptionalTensor& out_cache_loc, const Tensor& q,
                                            int64_t num_tokens, const PageTable& table, int32_t* report) {
  if (!out_cache_loc) fail(op, "out_cache_loc must be given with new rows to store");
  Dim tokens("num_tokens", num_tokens, "the new rows");
  const IndexArray slots = checked_indices(op, "out_cache_loc", *out_cache_loc, tokens, "q", q);
  return {.num_tokens = slots.size,
          .out_cache_loc = slots,
          .page_size = table.page_size,
          .page_shift = shift_of(table.page_size),
          .num_slots = table.num_pages * table.page_size,
          .report = report};
}

}  // namespace attnops::layer_call
