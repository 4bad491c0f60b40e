#include "core/impl_table.h"
#include "device/common/launch_dependent.cuh"
#include "fp4_kv/cuda/decode.cuh"
#include "fp4_kv/cuda/launch.h"

namespace attnops::fp4_kv {
namespace {

template <typename T, int kDim, int kRowTiles>
void launch_decode(const DecodeParams& p, cudaStream_t stream) {
  const int64_t works = int64_t{p.batch_size} * p.num_kv_heads * p.num_splits;
  const int blocks = static_cast<int>(ceil_div<int64_t>(works, kWarps));
  if (blocks > 0) {
    launch_dependent<&fp4_decode_kernel<T, kDim, kRowTiles>>("fp4_decode_kernel", {blocks, 32 * kWarps, 0, 0}, stream,
                                                             p);
  }
  const int64_t rows = int64_t{p.batch_size} * p.seqlen_q * p.num_q_heads;
  if (rows > 0) {
    launch_dependent<&fp4_merge_kernel<T>>("fp4_merge_kernel",
                                           {static_cast<int>(ceil_div<int64_t>(rows, 4)), 128, 0, 0}, stream, p);
  }
}

bool aligned(const Pages& pages, int64_t codes, int64_t scales) {
  const auto fits = [](const void* at, int64_t a, int64_t b, int64_t c, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(at) % bytes == 0 && a % bytes == 0 && b % bytes == 0 && c % bytes == 0;
  };
  return fits(pages.codes, pages.codes_stride_page, pages.codes_stride_token, pages.codes_stride_head, codes) &&
         fits(pages.scales, pages.scales_stride_page, pages.scales_stride_token, pages.scales_stride_head, scales);
}

struct Impl {
  const char* name;
  DType dtype;
  int head_dim, rows;
  void (*run)(const DecodeParams&, cudaStream_t);

  std::string reject(const DecodeParams& p) const {
    if (p.dtype != dtype) return std::string("takes q of ") + name_of(dtype) + ", got " + name_of(p.dtype);
    if (p.head_dim != head_dim) {
      return "takes head_dim " + std::to_string(head_dim) + ", got " + std::to_string(p.head_dim);
    }
    const int rows_here = p.num_q_heads / p.num_kv_heads * p.seqlen_q;
    if (rows_here > rows) {
      return "takes up to " + std::to_string(rows) + " query rows (tokens times heads of a group), got " +
             std::to_string(rows_here);
    }
    if (!p.v.codes) return "takes V of its own, got none: MLA rows are the CPU's";
    if (p.head_dim_v != p.head_dim) {
      return "takes V of K's head_dim, got " + std::to_string(p.head_dim_v) + " and " + std::to_string(p.head_dim);
    }
    if (p.num_splits == 0) return "needs out_partial and lse_partial";
    if (!aligned(p.k, 16, head_dim / 64) || !aligned(p.v, 16, head_dim / 64)) {
      return "rows of codes must start on 16-byte boundaries, those of scales on " + std::to_string(head_dim / 64);
    }
    return "";
  }
};

template <typename T, int kDim, int kRowTiles>
constexpr Impl row(const char* name, DType dtype) {
  return {name, dtype, kDim, kRowsOfTile * kRowTiles, &launch_decode<T, kDim, kRowTiles>};
}

constexpr Impl kImpls[] = {
    row<__nv_bfloat16, 128, 1>("bf16_hd128_rows8", DType::kBFloat16),
    row<__nv_bfloat16, 128, 2>("bf16_hd128_rows16", DType::kBFloat16),
    row<__nv_bfloat16, 64, 1>("bf16_hd64_rows8", DType::kBFloat16),
    row<__nv_bfloat16, 64, 2>("bf16_hd64_rows16", DType::kBFloat16),
    row<__half, 128, 1>("fp16_hd128_rows8", DType::kFloat16),
    row<__half, 128, 2>("fp16_hd128_rows16", DType::kFloat16),
    row<__half, 64, 1>("fp16_hd64_rows8", DType::kFloat16),
    row<__half, 64, 2>("fp16_hd64_rows16", DType::kFloat16),
};

}  // namespace

void launch(const DecodeParams& params, cudaStream_t stream) {
  select_impl("fp4_decode", kImpls, params).run(params, stream);
}

}  // namespace attnops::fp4_kv
