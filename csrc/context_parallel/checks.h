#pragma once
#include "context_parallel/params.h"
#include "torch_bindings/check.h"

// The ops' whole contract, checked once for all devices.
namespace attnops::context_parallel {

inline Share checked_share(const char* op, int64_t rank, int64_t world_size, int64_t interleave) {
  check_range(op, "world_size", world_size, 1, INT32_MAX);
  check_range(op, "rank", rank, 0, world_size - 1);
  check_range(op, "interleave", interleave, 1, INT32_MAX);
  return {.rank = rank, .world_size = world_size, .interleave = interleave};
}

inline SeqlensParams checked_seqlens(const Tensor& local_seqlens, const Tensor& seqlens, int64_t rank,
                                     int64_t world_size, int64_t interleave, int64_t tokens_per_request) {
  const char* op = "context_parallel_seqlens";
  const Share share = checked_share(op, rank, world_size, interleave);
  check_range(op, "tokens_per_request", tokens_per_request, 1, INT32_MAX);
  Dim batch_size("batch_size");
  TensorCheck(op, "seqlens", seqlens).dtype({DType::kInt32}).shape({batch_size}).contiguous();
  Dim rows("batch_size * tokens_per_request", *batch_size * tokens_per_request, "seqlens");
  TensorCheck(op, "local_seqlens", local_seqlens)
      .device_as("seqlens", seqlens)
      .dtype({DType::kInt32})
      .shape({rows})
      .contiguous();
  return {.share = share,
          .batch_size = *batch_size,
          .tokens_per_request = tokens_per_request,
          .seqlens = static_cast<const int32_t*>(seqlens.const_data_ptr()),
          .local_seqlens = static_cast<int32_t*>(local_seqlens.mutable_data_ptr())};
}

inline SlotsParams checked_slots(const Tensor& local_slots, const Tensor& slots, int64_t rank, int64_t world_size,
                                 int64_t interleave) {
  const char* op = "context_parallel_slots";
  const Share share = checked_share(op, rank, world_size, interleave);
  Dim num_tokens("num_tokens");
  TensorCheck(op, "slots", slots).dtype({DType::kInt32, DType::kInt64}).shape({num_tokens}).contiguous();
  TensorCheck(op, "local_slots", local_slots)
      .device_as("slots", slots)
      .dtype_as("slots", slots)
      .shape({num_tokens})
      .contiguous();
  return {.share = share,
          .num_slots = *num_tokens,
          .wide = has_dtype(slots, DType::kInt64),
          .slots = slots.const_data_ptr(),
          .local_slots = local_slots.mutable_data_ptr()};
}

}  // namespace attnops::context_parallel
