#include "core/impl_table.h"
#include "xqa_decode/cpu/instantiations.h"
#include "xqa_decode/cpu/reference.h"

namespace attnops::xqa_decode::cpu {
namespace {

using attnops::cpu::BFloat16;
using attnops::cpu::Float16;
using attnops::cpu::Float8E4M3;
using attnops::cpu::Float8E5M2;

// Best first.
const Impl kImpls[] = {
    {"amx_bfloat16", Isa::kAmx, DType::kBFloat16, 8, &amx_bfloat16, &amx_bfloat16_fp8, nullptr},
    {"avx512bf16_bfloat16", Isa::kAvx512Bf16, DType::kBFloat16, 8, &avx512bf16_bfloat16, &avx512bf16_bfloat16_fp8,
     nullptr},
    {"avx512_float32", Isa::kAvx512, DType::kFloat32, 8, &avx512_float32, &avx512_float32_fp8, nullptr},
    {"avx512_float16", Isa::kAvx512, DType::kFloat16, 8, &avx512_float16, &avx512_float16_fp8, nullptr},
    {"avx512_bfloat16", Isa::kAvx512, DType::kBFloat16, 8, &avx512_bfloat16, &avx512_bfloat16_fp8, nullptr},
    {"avx2_float32", Isa::kAvx2, DType::kFloat32, 8, &avx2_float32, &avx2_float32_fp8, nullptr},
    {"avx2_float16", Isa::kAvx2, DType::kFloat16, 8, &avx2_float16, &avx2_float16_fp8, nullptr},
    {"avx2_bfloat16", Isa::kAvx2, DType::kBFloat16, 8, &avx2_bfloat16, &avx2_bfloat16_fp8, nullptr},
    {"scalar_float32", Isa::kScalar, DType::kFloat32, 1, &reference::kKernel<float, float>,
     &reference::kKernel<float, Float8E4M3>, &reference::kKernel<float, Float8E5M2>},
    {"scalar_float16", Isa::kScalar, DType::kFloat16, 1, &reference::kKernel<Float16, Float16>,
     &reference::kKernel<Float16, Float8E4M3>, &reference::kKernel<Float16, Float8E5M2>},
    {"scalar_bfloat16", Isa::kScalar, DType::kBFloat16, 1, &reference::kKernel<BFloat16, BFloat16>,
     &reference::kKernel<BFloat16, Float8E4M3>, &reference::kKernel<BFloat16, Float8E5M2>},
};

}  // namespace

std::string Impl::reject(const ImplKey& key) const {
  if (key.dtype != dtype) return std::string("q must be ") + name_of(dtype) + ", got " + name_of(key.dtype);
  if (key.isa < isa) return std::string("needs ") + name_of(isa) + ", this processor runs " + name_of(key.isa);
  if (key.head_dim % head_dim_multiple != 0) {
    return "head_dim must be a multiple of " + std::to_string(head_dim_multiple) + ", got " +
           std::to_string(key.head_dim);
  }
  if (key.kv_dtype == DType::kFloat8E5M2 && e5m2 == nullptr) return "takes FP8 pages of float8_e4m3fn, got float8_e5m2";
  return "";
}

const TileKernel& select_tile_kernel(const ImplKey& key) {
  const Impl& impl = select_impl("xqa_decode", kImpls, key);
  if (key.kv_dtype == DType::kFloat8E5M2) return *impl.e5m2;
  return key.kv_dtype == key.dtype ? *impl.plain : *impl.fp8;
}

}  // namespace attnops::xqa_decode::cpu
