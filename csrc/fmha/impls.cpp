#include "fmha/impls.h"

#include <string>

#include "core/impl_table.h"
#include "fmha/cuda/any.h"
#include "fmha/sm90/launch.h"

namespace attnops::fmha {
namespace {

bool on_bytes(int bytes, const void* base, DType dtype, std::initializer_list<int64_t> strides) {
  bool aligned = reinterpret_cast<uintptr_t>(base) % bytes == 0;
  for (const int64_t stride : strides) aligned = aligned && stride * size_of(dtype) % bytes == 0;
  return aligned;
}

struct Impl {
  const char* name;
  DType dtype;
  int head_dim_qk, head_dim_v;  // the largest
  Launch launch;
  bool any_rows = false;  // wherever rows start

  std::string reject(const Params& p) const {
    if (p.dtype != dtype) return std::string("takes q of ") + name_of(dtype) + ", got " + name_of(p.dtype);
    if (p.kv_dtype != dtype && p.kv_dtype != DType::kFloat8E4M3) {
      return std::string("takes keys of ") + name_of(dtype) + " or float8_e4m3fn, got " + name_of(p.kv_dtype);
    }
    if (p.head_dim_qk > head_dim_qk) {
      return "takes head_dim_qk up to " + std::to_string(head_dim_qk) + ", got " + std::to_string(p.head_dim_qk);
    }
    if (p.head_dim_v > head_dim_v) {
      return "takes head_dim_v up to " + std::to_string(head_dim_v) + ", got " + std::to_string(p.head_dim_v);
    }
    if (any_rows) return "";
    if (!on_bytes(16, p.q, p.dtype, {p.q_stride_token, p.q_stride_head}) ||
        !on_bytes(16, p.out, p.dtype, {p.out_stride_token, p.out_stride_head})) {
      return "rows of q and out must start on 16-byte boundaries";
    }
    const int bytes = 8 * size_of(p.kv_dtype);
    if (!on_bytes(bytes, p.k, p.kv_dtype, {p.k_stride_page, p.k_stride_token, p.k_stride_head}) ||
        !on_bytes(bytes, p.v, p.kv_dtype, {p.v_stride_page, p.v_stride_token, p.v_stride_head})) {
      return "rows of k and v must start on " + std::to_string(bytes) + "-byte boundaries";
    }
    return "";
  }
};

// A head dim is served by the smallest kernel that holds it.
constexpr Impl kImpls[] = {
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_bf16_hd64", DType::kBFloat16, 64, 64, &sm90::launch_bf16_hd64},
    {"sm90_bf16_hd96", DType::kBFloat16, 96, 96, &sm90::launch_bf16_hd96},
    {"sm90_bf16_hd128", DType::kBFloat16, 128, 128, &sm90::launch_bf16_hd128},
    {"sm90_bf16_hd192x128", DType::kBFloat16, 192, 128, &sm90::launch_bf16_hd192x128},
    {"sm90_bf16_hd192", DType::kBFloat16, 192, 192, &sm90::launch_bf16_hd192},
    {"sm90_bf16_hd256", DType::kBFloat16, 256, 256, &sm90::launch_bf16_hd256},
    {"sm90_fp16_hd64", DType::kFloat16, 64, 64, &sm90::launch_fp16_hd64},
    {"sm90_fp16_hd96", DType::kFloat16, 96, 96, &sm90::launch_fp16_hd96},
    {"sm90_fp16_hd128", DType::kFloat16, 128, 128, &sm90::launch_fp16_hd128},
    {"sm90_fp16_hd192x128", DType::kFloat16, 192, 128, &sm90::launch_fp16_hd192x128},
    {"sm90_fp16_hd192", DType::kFloat16, 192, 192, &sm90::launch_fp16_hd192},
    {"sm90_fp16_hd256", DType::kFloat16, 256, 256, &sm90::launch_fp16_hd256},
#endif
    {"any_bf16", DType::kBFloat16, kAnyHeadDim, kAnyHeadDim, &launch_any_bf16, true},
    {"any_fp16", DType::kFloat16, kAnyHeadDim, kAnyHeadDim, &launch_any_fp16, true},
    {"any_fp32", DType::kFloat32, kAnyHeadDim, kAnyHeadDim, &launch_any_fp32, true},
};

}  // namespace

Launch select_launch(const char* op, const Params& params) { return select_impl(op, kImpls, params).launch; }

}  // namespace attnops::fmha
