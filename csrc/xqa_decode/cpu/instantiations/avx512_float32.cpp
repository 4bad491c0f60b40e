#include "xqa_decode/cpu/vec512.h"
// the registers come first
#include "xqa_decode/cpu/instantiations.h"
#include "xqa_decode/cpu/kernel.h"

namespace attnops::xqa_decode::cpu {

constexpr TileKernel avx512_float32 = float_kernel<float>();
constexpr TileKernel avx512_float32_fp8 = float_fp8_kernel<float>();

}  // namespace attnops::xqa_decode::cpu
