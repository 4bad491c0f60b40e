#pragma once
#include "merge_state/params.h"
#include "torch_bindings/check.h"

namespace attnops::merge_state {

// The op's whole contract, checked once for all devices. Params exist only when the arguments are right.
inline Params checked_params(const Tensor& out, const Tensor& lse, const Tensor& out_a, const Tensor& lse_a,
                             const Tensor& out_b, const Tensor& lse_b) {
  Dim num_tokens("num_tokens"), num_heads("num_heads"), head_dim("head_dim");

  const auto check_out = [&](const char* name, const Tensor& tensor) {
    TensorCheck("merge_state", name, tensor)
        .device_as("out_a", out_a)
        .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
        .dtype_as("out_a", out_a)
        .shape({num_tokens, num_heads, head_dim})
        .dense_last();
  };
  const auto check_lse = [&](const char* name, const Tensor& tensor) {
    TensorCheck("merge_state", name, tensor)
        .device_as("out_a", out_a)
        .dtype({DType::kFloat32})
        .shape({num_tokens, num_heads})
        .contiguous();
  };
  check_out("out_a", out_a);
  check_out("out_b", out_b);
  check_out("out", out);
  TensorCheck("merge_state", "out", out).apart();
  check_lse("lse_a", lse_a);
  check_lse("lse_b", lse_b);
  check_lse("lse", lse);

  const auto side = [](const Tensor& side_out, const Tensor& side_lse) {
    return Params::Side{.out = side_out.const_data_ptr(),
                        .lse = static_cast<const float*>(side_lse.const_data_ptr()),
                        .out_stride_token = side_out.stride(0),
                        .out_stride_head = side_out.stride(1)};
  };
  return {.num_tokens = *num_tokens,
          .num_heads = num_heads.as_int(),
          .head_dim = head_dim.as_int(),
          .a = side(out_a, lse_a),
          .b = side(out_b, lse_b),
          .out = out.mutable_data_ptr(),
          .lse = static_cast<float*>(lse.mutable_data_ptr()),
          .out_stride_token = out.stride(0),
          .out_stride_head = out.stride(1),
          .dtype = dtype_of(out_a)};
}

inline ManyParams checked_many_params(const Tensor& out, const Tensor& lse, const Tensor& outs, const Tensor& lses) {
  Dim num_states("num_states"), num_tokens("num_tokens"), num_heads("num_heads"), head_dim("head_dim");
  TensorCheck("merge_states", "outs", outs)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({num_states, num_tokens, num_heads, head_dim})
      .dense_last();
  TensorCheck("merge_states", "lses", lses)
      .device_as("outs", outs)
      .dtype({DType::kFloat32})
      .shape({num_states, num_tokens, num_heads})
      .contiguous();
  TensorCheck("merge_states", "out", out)
      .device_as("outs", outs)
      .dtype_as("outs", outs)
      .shape({num_tokens, num_heads, head_dim})
      .dense_last()
      .apart();
  TensorCheck("merge_states", "lse", lse)
      .device_as("outs", outs)
      .dtype({DType::kFloat32})
      .shape({num_tokens, num_heads})
      .contiguous();
  return {.num_tokens = *num_tokens,
          .num_states = num_states.as_int(),
          .num_heads = num_heads.as_int(),
          .head_dim = head_dim.as_int(),
          .outs = outs.const_data_ptr(),
          .lses = static_cast<const float*>(lses.const_data_ptr()),
          .outs_stride_state = outs.stride(0),
          .outs_stride_token = outs.stride(1),
          .outs_stride_head = outs.stride(2),
          .out = out.mutable_data_ptr(),
          .lse = static_cast<float*>(lse.mutable_data_ptr()),
          .out_stride_token = out.stride(0),
          .out_stride_head = out.stride(1),
          .dtype = dtype_of(outs)};
}

}  // namespace attnops::merge_state
