#include "xqa_decode/cpu/vec512.h"
// the registers come first
#include "xqa_decode/cpu/instantiations.h"
#include "xqa_decode/cpu/kernel_bf16.h"

namespace attnops::xqa_decode::cpu {

constexpr TileKernel avx512bf16_bfloat16 = pair_kernel<false>();
constexpr TileKernel avx512bf16_bfloat16_fp8 = pair_kernel<true>();

}  // namespace attnops::xqa_decode::cpu
