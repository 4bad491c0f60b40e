#include <string>

#include "core/impl_table.h"
#include "device/common/capability.h"
#include "fp4_kv/cuda/launch.h"
#include "fp4_kv/shapes.h"
#include "fp4_kv/sm90/launch.h"

namespace attnops::fp4_kv {
namespace {

struct Impl {
  const char* name;
  DType dtype;
  int head_dim, rows;  // 0: any number of rows
  void (*run)(const DecodeParams&, CUstream_st*);
  std::string (*reject_more)(const DecodeParams&) = nullptr;  // limits of one architecture's kernels

  std::string reject(const DecodeParams& p) const {
    if (p.dtype != dtype) return std::string("takes q of ") + name_of(dtype) + ", got " + name_of(p.dtype);
    if (p.head_dim != head_dim) {
      return "takes head_dim " + std::to_string(head_dim) + ", got " + std::to_string(p.head_dim);
    }
    const int rows_here = p.num_q_heads / p.num_kv_heads * p.seqlen_q;
    if (rows > 0 && rows_here > rows) {
      return "takes up to " + std::to_string(rows) + " query rows (tokens times heads of a group), got " +
             std::to_string(rows_here);
    }
    const bool latents = head_dim == kLatentDim;
    if (latents && (p.v.codes || p.num_kv_heads != 1 || p.head_dim_v != kLatentDimV)) {
      return "takes one KV head and V of its first 512 values, got " + std::to_string(p.num_kv_heads) + " and " +
             (p.v.codes ? "V of its own" : std::to_string(p.head_dim_v));
    }
    if (!latents && !p.v.codes) return "takes V of its own, got none";
    if (!latents && p.head_dim_v != p.head_dim) {
      return "takes V of K's head_dim, got " + std::to_string(p.head_dim_v) + " and " + std::to_string(p.head_dim);
    }
    if (p.num_splits == 0) return "needs out_partial and lse_partial";
    const int codes = latents ? 8 : 16, scales = latents ? 1 : head_dim / 64;
    if (!rows_on(p.k, codes, scales) || !rows_on(p.v, codes, scales)) {
      return "rows of codes must start on " + std::to_string(codes) + "-byte boundaries, those of scales on " +
             std::to_string(scales);
    }
    return reject_more ? reject_more(p) : "";
  }
};

#if defined(ATTNOPS_HAS_SM90)
std::string reject_sm90(const DecodeParams& p) {
  if (!tiles_in_pages(p, kLatentKeys)) return "takes page_size a multiple of 64 and strides of 25 bits";
  if (!rows_on(p.k, 16, 2)) return "takes rows of codes on 16-byte boundaries, those of scales on 2";
  const int64_t q = reinterpret_cast<intptr_t>(p.q) / 2 | p.q_stride_request | p.q_stride_token | p.q_stride_head;
  if (q % 8 != 0) return "takes rows of q on 16-byte boundaries";
  const int sm = usable_sm("fp4_decode");
  return sm == 90 ? "" : "runs on sm_90, this device is sm_" + std::to_string(sm);
}
#endif

constexpr Impl kImpls[] = {
    {"bf16_hd128_rows8", DType::kBFloat16, 128, 8, &launch_bf16_hd128_rows8},
    {"bf16_hd128_rows16", DType::kBFloat16, 128, 16, &launch_bf16_hd128_rows16},
    {"bf16_hd64_rows8", DType::kBFloat16, 64, 8, &launch_bf16_hd64_rows8},
    {"bf16_hd64_rows16", DType::kBFloat16, 64, 16, &launch_bf16_hd64_rows16},
    {"fp16_hd128_rows8", DType::kFloat16, 128, 8, &launch_fp16_hd128_rows8},
    {"fp16_hd128_rows16", DType::kFloat16, 128, 16, &launch_fp16_hd128_rows16},
    {"fp16_hd64_rows8", DType::kFloat16, 64, 8, &launch_fp16_hd64_rows8},
    {"fp16_hd64_rows16", DType::kFloat16, 64, 16, &launch_fp16_hd64_rows16},
#if defined(ATTNOPS_HAS_SM90)
    {"sm90_bf16_latents", DType::kBFloat16, kLatentDim, 0, &sm90::launch_bf16_latents, &reject_sm90},
    {"sm90_fp16_latents", DType::kFloat16, kLatentDim, 0, &sm90::launch_fp16_latents, &reject_sm90},
#endif
    {"bf16_latents", DType::kBFloat16, kLatentDim, 0, &launch_bf16_latents},
    {"fp16_latents", DType::kFloat16, kLatentDim, 0, &launch_fp16_latents},
};

}  // namespace

void launch(const DecodeParams& params, CUstream_st* stream) {
  select_impl("fp4_decode", kImpls, params).run(params, stream);
}

}  // namespace attnops::fp4_kv
